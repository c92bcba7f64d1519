"""Sleeping and offloading on GPUs, as `gpu_memory` measures them; its lines are printed."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_memory import CASES, SHAPE

SCRIPT = Path(__file__).parents[3] / "helpers" / "gpu_memory.py"
pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(1600)]


def run(ranks: int, out: Path) -> dict[str, dict[str, Any]]:
    """What was measured, by case."""
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs")
    command = [sys.executable, SCRIPT, "--ranks", str(ranks), "--out", out]
    done = subprocess.run(command, text=True, capture_output=True, timeout=1500)
    print(done.stdout, done.stderr[-4000:] if done.returncode else "")
    lines = [json.loads(line) for line in (out / f"memory_{ranks}.jsonl").read_text().splitlines()]
    assert len(lines) == sum(case.ranks == ranks for case in CASES)
    problems = [f"{line['case']}: {line['problem']}" for line in lines if "problem" in line]
    assert not problems, "\n".join(problems)
    return {line["case"]: line for line in lines}


def check_sleep(line: dict[str, Any]) -> None:
    name = line["case"]
    assert line["same_to_the_bit"], f"{name}: something came back otherwise"
    assert line["exchange"], f"{name}: a batch of sends and receives mixed them up"
    # An engine that keeps next to nothing on the device has next to nothing to free.
    if line["held_gib"] > 4:
        assert line["freed_share"] > 0.9, f"{name}: {line['asleep_gib']} of {line['held_gib']} GiB stayed"
    assert line["asleep_gib"] < 1.5
    assert line["awake_again_gib"] < line["held_gib"] + 0.5, f"{name}: more with every sleep"
    assert line["host_growth_gib"] < 0.5, f"{name}: host memory grows with every sleep"
    assert line["given_out_alike"], f"{name}: an engine that is down to its weights gives out others"
    assert line["same_after_turn"], f"{name}: something came back otherwise by way of the weights"
    # Beside the weights there are communicators, and what torch rounds up.
    assert line["down_gib"] < line["weights_gib"] + line["nccl_gib"] + 1.5, f"{name}: more than the weights stayed"
    assert line["off_gib"] < line["asleep_gib"] + 0.5, f"{name}: asleep in two steps is not asleep"
    # What the engine says of itself is what the driver says.
    assert line["slept_freed_gib"] == pytest.approx(line["held_gib"] - line["asleep_gib"], abs=0.5)
    assert line["slept_held_gib"] == pytest.approx(line["held_gib"], abs=1.0)


def test_one_gpu(tmp_path: Path) -> None:
    lines = run(1, tmp_path)
    for line in lines.values():
        check_sleep(line)
    plain = lines["plain"]
    weights = parameters() * 2 / 2**30
    # bfloat16 weights, float32 gradients, float32 weights and two moments.
    assert plain["between_tasks_gib"] > 8 * weights
    for name in ("offload", "precision-aware", "frozen"):
        assert lines[name]["between_tasks_gib"] < 1.5, f"{name}: does not leave the device between tasks"
    # The hybrid optimizer keeps twelve bytes a parameter, or half of them, on the host.
    assert lines["hybrid"]["between_tasks_gib"] < plain["between_tasks_gib"] - 5 * weights
    assert lines["hybrid-half"]["between_tasks_gib"] < plain["between_tasks_gib"] - 2 * weights
    for name in ("offload", "precision-aware", "hybrid", "hybrid-half"):
        assert lines[name]["norms"] == pytest.approx(plain["norms"], rel=2e-3), name
    for name in ("offload", "hybrid"):
        assert lines[name]["norms_after_load"] == pytest.approx(lines[name]["norms_after_save"], rel=2e-3), name
    again, offloaded = lines["plain-again"], lines["offload"]
    assert (again["norms"], again["weights"]) == (plain["norms"], plain["weights"]), "training itself is not repeatable"
    assert (offloaded["norms"], offloaded["weights"]) == (plain["norms"], plain["weights"])


def test_two_gpus(tmp_path: Path) -> None:
    lines = run(2, tmp_path)
    for line in lines.values():
        check_sleep(line)
        assert line["nccl_gib"] > 0, f"{line['case']}: the communicators freed nothing"
    assert lines["dp2-offload"]["norms"] == pytest.approx(lines["dp2"]["norms"], rel=2e-3)


def parameters() -> int:
    """How many parameters the model has, norms aside."""
    hidden, heads = SHAPE["hidden_size"], SHAPE["head_dim"]
    attention = 2 * hidden * heads * (SHAPE["num_attention_heads"] + SHAPE["num_key_value_heads"])
    layer = attention + 3 * hidden * SHAPE["intermediate_size"]
    return SHAPE["num_hidden_layers"] * layer + 2 * SHAPE["vocab_size"] * hidden
