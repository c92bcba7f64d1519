"""The same pipeline on other layouts: same data, same numbers."""

from __future__ import annotations

import re

import pyarrow.parquet as pq
import pytest

pytestmark = pytest.mark.slow


def test_dp2_x_tp2_trains_like_one_process(lab, unbroken, tmp_path):
    pipeline = lab.tiny_pipeline()
    pipeline["groups"]["train"] = {"cpus_per_node": 4}
    pipeline["engines"]["actor"]["parallel"] = {"tensor_model_parallel_size": 2}
    pipeline["groups"]["rollout"] = {"cpus_per_node": 2}
    # One step: from the second on, rounding may turn a sampled token, and then the numbers are others.
    pipeline["run"] = {"steps": 1, "seed": 3}
    run = lab.start(lab.write_pipeline(tmp_path, pipeline), tmp_path / "run")
    assert run.wait() == 0, run.output
    assert said(run) == said(unbroken)
    mine, theirs = run.metrics()[0], unbroken.metrics()[0]
    for name in ("reward/mean", "loss/policy", "kl/ref", "entropy", "grad_norm", "ratio/mean", "kl/old"):
        assert mine[name] == pytest.approx(theirs[name], rel=1e-4, abs=1e-7), name
    # Every row counts once, though two ranks compute it, and all four are held for it.
    tokens = 32 * (4 + mine["response_tokens/mean"])
    for name in ("ref", "update"):
        per_rank = mine[f"throughput/{name}_tokens_per_s_per_gpu"]
        assert per_rank * 4 * mine[f"time/{name}_s"] == pytest.approx(tokens), name


def said(run) -> list[list[int]]:
    """The responses of the first step."""
    return pq.read_table(run.folder / "samples" / "step_1.parquet")["response_tokens"].to_pylist()


def test_engines_that_share_a_group_give_the_same_numbers(lab, unbroken, on_one_slot):
    assert lab.comparable(on_one_slot.metrics()) == lab.comparable(unbroken.metrics()[:3])


def test_a_ring_of_records_keeps_the_last_steps_and_their_states(on_one_slot):
    records = on_one_slot.folder / "records"
    assert sorted(path.name for path in records.glob("step_*")) == ["step_2", "step_3"]
    assert sorted(path.name for path in records.glob("states/step_*")) == ["step_1", "step_2"]
    kept = {path.stem for path in (records / "columns").iterdir()}
    named = set(re.findall(r"[0-9a-f]{32}", "".join(path.read_text() for path in records.glob("step_*/*.json"))))
    assert kept == named


def test_an_update_is_replayed_from_the_state_in_a_ring(lab, on_one_slot):
    replayed = lab.call("replay", on_one_slot.folder, "--step", 3, "--debug", "--node", "update")
    assert replayed.returncode == 0, replayed.stderr + replayed.stdout
    assert "actor from the state after step 2\n" in replayed.stdout
    assert replayed.stdout.endswith("equal to the bit\n")
