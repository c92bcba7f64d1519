"""Servers' own models take weights in fp8 as the sender sends them, update after update."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

_SCRIPT = Path(__file__).parents[2] / "helpers" / "fp8_server_model.py"


@pytest.mark.parametrize(("server", "ranks"), [("sglang", 2), ("vllm", 1)])
def test_a_servers_model_has_the_values_and_scales_that_were_sent(server: str, ranks: int) -> None:
    if importlib.util.find_spec(server) is None:
        pytest.skip(f"{server} is not in this environment")
    ended = subprocess.run([sys.executable, _SCRIPT, server], capture_output=True, text=True, timeout=800, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]
    said = [line for line in ended.stdout.splitlines() if line.startswith("rank ")]
    assert said == [
        f"rank {rank} of {ranks} has the weights with a scale for each {part}"
        for part in ("block", "channel")
        for rank in range(ranks)
    ]
