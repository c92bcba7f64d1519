"""The tiny pipeline on GPUs: the same file with other groups, Transformer Engine and bf16 in place of the CPU path."""

from __future__ import annotations

import gzip
import json
from typing import Any

import pytest

pytestmark = [pytest.mark.gpu, pytest.mark.slow]


def on_gpus(pipeline: dict[str, Any], gpus: int, **parallel: Any) -> dict[str, Any]:
    """The tiny pipeline with trainer and generator on the same GPUs, wide enough for Transformer Engine's kernels."""
    pipeline["model"]["init"] |= {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
    pipeline["groups"] = {"gpu": {"gpus_per_node": gpus}}
    pipeline["engines"]["actor"] |= {"group": "gpu", "parallel": parallel}
    pipeline["engines"]["generator"]["group"] = "gpu"
    return pipeline


def check(run: Any, steps: int) -> None:
    assert run.wait() == 0, run.output
    metrics = run.metrics()
    assert [line["step"] for line in metrics] == list(range(1, steps + 1))
    first = metrics[0]
    # The reference starts as the policy, and two mini-batches of lr 1e-3 have not moved it far.
    assert abs(first["kl/ref"]) < 5e-2
    assert first["ratio/mean"] == pytest.approx(1, abs=5e-2)
    assert all(0 < line["grad_norm"] < 100 for line in metrics if line["reward/std"] > 0)
    assert run.left_behind() == []


def test_it_runs_on_one_gpu_and_continues_from_its_checkpoint(lab, tmp_path):
    pipeline = lab.write_pipeline(tmp_path, on_gpus(lab.tiny_pipeline(), 1))
    check(lab.start(pipeline, tmp_path / "run"), 6)
    check(lab.start(pipeline, tmp_path / "run", "run.steps=8"), 8)


def test_it_runs_with_tp2_on_two_gpus(lab, tmp_path):
    torch = pytest.importorskip("torch")
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    pipeline = on_gpus(lab.tiny_pipeline(), 2, tensor_model_parallel_size=2, sequence_parallel=True)
    check(lab.start(lab.write_pipeline(tmp_path, pipeline), tmp_path / "run"), 6)


def test_profiles_hold_kernels_and_nodes_say_how_well_they_use_the_gpu(lab, tmp_path):
    from dagrl.backends.planning.gpus import gpu_of_driver

    torch = pytest.importorskip("torch")
    pipeline = on_gpus(lab.tiny_pipeline(), 1)
    pipeline["run"]["steps"] = 2
    pipeline["profile"] = {"steps": [2], "nodes": ["update"]}
    run = lab.start(lab.write_pipeline(tmp_path, pipeline), tmp_path / "run")
    check(run, 2)
    with gzip.open(run.folder / "profile" / "step_2" / "update-actor-0.json.gz", "rt") as file:
        events = json.load(file)["traceEvents"]
    assert any(event.get("cat") == "kernel" for event in events)
    for line in run.metrics():
        for node in ("old", "ref", "update"):
            assert 0 < line[f"memory/{node}_peak_gib"] < 10
            if gpu_of_driver(torch.cuda.get_device_name()):
                assert 0 < line[f"mfu/{node}"] < 0.7
        assert "mfu/rollout" not in line
        assert line["memory/rollout_peak_gib"] > 0


def test_a_recorded_update_is_replayed_on_gpus_and_on_a_cpu(lab, tmp_path):
    """Other kernels round otherwise: bfloat16 keeps eight bits."""
    torch = pytest.importorskip("torch")
    pipeline = on_gpus(lab.tiny_pipeline(), 1)
    pipeline["run"] |= {"steps": 3, "record": ["ref", "update"]}
    run = lab.start(lab.write_pipeline(tmp_path, pipeline), tmp_path / "run")
    check(run, 3)
    again = lab.call("replay", run.folder, "--step", 3)
    assert again.returncode == 0 and again.stdout.endswith("equal to the bit\n"), again.stdout + again.stderr
    moves = [("--to", "cpu")]
    if torch.cuda.device_count() > 1:
        moves.append(("--layout", "tensor_model_parallel_size=2"))
    for move in moves:
        moved = lab.call("replay", run.folder, "--step", 3, "--node", "ref", *move, "--within", 2**-6)
        assert moved.returncode == 0, moved.stdout + moved.stderr
