"""The times of a run in the plan of another one: `dagrl plan --from RUN`.

`measured_runs` are two real runs of eight steps on CPU slots, `twice` with twice the responses to each prompt: four
layers of 128, one thread for each of trainer and generator, 2026-11-25.
"""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from finished_runs import TEMPLATE, write_run

from dagrl.cli import main
from dagrl.planner.simulation.costs import CostTable
from dagrl.reporting.measured_run import lengths_of_run
from dagrl.reporting.run_data.run_reader import open_run
from dagrl.reporting.why.explain import explain

RUNS = Path(__file__).parent / "measured_runs"
SECONDS = CostTable({"rollout": 2.0, "reward": 3.0, "ref": 0.5, "update": 2.0}, sync=1.0, save=8.0)


def planned(capsys, *call: str | Path) -> dict[str, Any]:
    assert main(["plan", "--json", *map(str, call)]) == 0
    return json.loads(capsys.readouterr().out)


def measured_step(folder: Path) -> float:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return median(line["time/step_s"] for line in lines[1:-1])


def test_a_real_run_predicts_another_with_twice_the_responses(capsys) -> None:
    pipeline = RUNS / "once" / "pipeline.yaml"
    told = planned(capsys, pipeline, "nodes.rollout.n=64", "--from", RUNS / "once")
    assert told["steps"][0]["step_s"] == pytest.approx(measured_step(RUNS / "twice"), rel=0.1)
    # The estimates of CPU slots are orders of magnitude.
    alone = planned(capsys, pipeline, "nodes.rollout.n=64")
    assert alone["steps"][0]["step_s"] > 2 * measured_step(RUNS / "twice")


def test_a_runs_own_pipeline_is_planned_as_it_was(capsys) -> None:
    told = planned(capsys, RUNS / "once" / "pipeline.yaml", "--from", RUNS / "once")
    assert told["steps"][0]["step_s"] == pytest.approx(measured_step(RUNS / "once"), rel=1e-3)
    assert told["steps"][0]["assumed"] == pytest.approx({"prompt_tokens": 4.0, "response_tokens": 2.4}, rel=0.02)
    (by,) = told["calibrated_by"]
    nodes = {node["name"]: node for node in by["nodes"]}
    assert set(nodes) == {"prompts", "rollout", "reward", "ref", "advantage", "update", "samples", "sync"}
    for name, node in nodes.items():
        assert node["factor"] == pytest.approx(node["measured_s"] / node["planned_s"]), name
        if name in told["steps"][0]["node_s"] and node["executor"] != "host":
            assert told["steps"][0]["node_s"][name] == pytest.approx(node["measured_s"], rel=0.1), name
    assert by["extrapolated"] == []


def test_the_text_shows_planned_beside_measured(capsys) -> None:
    assert main(["plan", str(RUNS / "once" / "pipeline.yaml"), "--from", str(RUNS / "once")]) == 0
    out = capsys.readouterr().out
    assert "calibrated by" in out and "medians of 6 steps up to 7" in out
    assert "are orders of magnitude" not in out


def test_a_search_that_proposes_nothing_fails_also_if_it_knows_a_run(capsys) -> None:
    dense = TEMPLATE.parent / "qwen3_8b_megatron.yaml"
    call = ("plan", dense, "--search", "--gpus", "1", "--gpu", "L4", "--from", RUNS / "once")
    assert main([*map(str, call)]) == 3
    assert "none that was tried fits" in capsys.readouterr().out


def test_a_search_learns_from_the_run_where_the_devices_are_the_same(capsys, tmp_path: Path) -> None:
    """A plan for GPUs takes only the times of the host from a run on CPU slots."""
    folder = write_run(tmp_path / "run", "run.save_every=null", "run.validate_every=null", steps=6, costs=SECONDS)
    dense = TEMPLATE.parent / "qwen3_8b_megatron.yaml"
    call = (dense, "nodes.reward.fn=exact", "--search", "--gpus", "2", "--gpu", "H200", "--top", "1")
    alone = planned(capsys, *call)["proposals"][0]
    told = planned(capsys, *call, "--from", folder)
    factors = {node["name"]: node["factor"] for node in told["calibrated_by"][0]["nodes"]}
    assert factors["update"] is None and factors["reward"] > 10
    assert any("actor is not calibrated: it ran on CPU slots, not on H200" in note
               for note in told["calibrated_by"][0]["extrapolated"])  # fmt: skip
    best = told["proposals"][0]
    assert best["node_s"]["reward"] == pytest.approx(alone["node_s"]["reward"] * factors["reward"], rel=0.01)
    assert 0 < best["lower_bound_s"] < best["step_s"]


@pytest.mark.parametrize(("steps", "said"), [(2, "has too few steps to learn from")])
def test_a_run_that_has_just_begun_is_refused(capsys, tmp_path: Path, steps: int, said: str) -> None:
    folder = write_run(tmp_path / "run", steps=steps)
    assert main(["plan", str(TEMPLATE), "--from", str(folder)]) == 2
    assert said in capsys.readouterr().err
    assert main(["plan", str(TEMPLATE), "--from", str(tmp_path)]) == 2
    assert "no run has written there" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("metrics", "prompt", "response"),
    [
        # More tokens than those of the step's rows: of prompts that a filter left out, or of a validation.
        ({"throughput/tokens_per_s": 1e9, "prompt_tokens/mean": 6.5, "response_tokens/mean": 2.0}, 6.5, 2.0),
        ({"throughput/tokens_per_s": 1e9, "response_tokens/mean": 2.0}, None, 2.0),
        # A response of several turns, with the answers between them.
        ({"prompt_tokens/mean": 6.5, "response_tokens/mean": 90.0}, 6.5, None),
        ({"prompt_tokens/mean": 9.5, "response_tokens/mean": 2.0}, None, 2.0),
        ({}, None, None),
    ],
)
def test_lengths_are_those_of_the_rows_that_are_trained_on(tmp_path, metrics, prompt, response):
    folder = write_run(tmp_path / "run", "data.max_prompt_tokens=8", "nodes.rollout.sampling.max_new_tokens=3")
    lines = [json.loads(line) | metrics for line in (folder / "metrics.jsonl").read_text().splitlines()]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = open_run(folder)
    found = lengths_of_run(run, run.pipeline().on_its_gpus, {2, 3})
    assert (found.prompt_tokens, found.response_tokens) == (prompt, response)
    assert "do not fit" not in explain(folder).why_no_advice
