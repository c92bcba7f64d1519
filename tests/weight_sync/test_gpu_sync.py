"""Weight syncs on GPUs: see `gpu_sync`, which runs all cases of a number of GPUs in one go."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from gpu_sync import CASES

SCRIPT = Path(__file__).parents[1] / "helpers" / "gpu_sync.py"


def run(gpus: int, *arguments: str, **environment: str) -> str:
    command = [sys.executable, SCRIPT, "--gpus", str(gpus), *arguments]
    done = subprocess.run(command, text=True, capture_output=True, env=os.environ | environment, timeout=500)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    return done.stdout


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("gpus", CASES)
def test_weights_arrive_on_gpus(gpus: int) -> None:
    if torch.cuda.device_count() < gpus:
        pytest.skip(f"needs {gpus} GPUs")
    run(gpus)


@pytest.mark.slow
def test_the_trainers_weights_arrive_without_gpus_too() -> None:
    """Megatron engines of two ranks, of which one or both own buckets: shared memory in place of CUDA IPC."""
    cases = ["near, TP2 to TP1 twice", "near, TP2 to TP2", "near, PP2 to two stages", "near, EP2 to EP2"]
    told = run(2, "--only", *cases, CUDA_VISIBLE_DEVICES="")
    assert all(case in told for case in cases) and "0 failed" in told
