"""The benchmark on a model that any machine can run: its two sides must train on the same thing."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.slow
@pytest.mark.soak
def test_both_sides_see_the_same_tokens_with_the_same_weights(tmp_path: Path) -> None:
    command = [sys.executable, BENCHMARKS / "train_step.py", "--model", "tiny", "--rounds", "2", "--warmup", "0"]
    command += ["--fused-linear-cross-entropy", "--weights", tmp_path]
    run = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert run.returncode == 0, run.stdout + run.stderr
    result = json.loads(run.stdout.splitlines()[-1])
    assert result["measured"].keys() == {
        "bare",
        "logprob",
        "dagrl",
        "dagrl with entropy",
        "whole logits",
        "logits twice",
    }
    assert all(row["seconds"] > 0 and row["tflops_per_gpu"] > 0 for row in result["measured"].values())
    assert result["steps"] == 2
    # The tiny vocabulary needs no padding, and everything is float32: what is left is rounding.
    assert result["nll"]["logprob"] == pytest.approx(result["nll"]["bare"], rel=1e-5)
    assert result["dagrl_over_bare"] == pytest.approx(
        result["measured"]["bare"]["seconds"] / result["measured"]["dagrl"]["seconds"]
    )
