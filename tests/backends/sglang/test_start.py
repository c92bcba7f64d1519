"""What is said of a server that cannot start; what needs SGLang for that is in `test_engine.py`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from dagrl.backends.backend import RankContext
from dagrl.backends.serving.gpu_memory import GpuMemory, gpu_memory, gpu_names
from dagrl.backends.serving.share import ServerShare
from dagrl.backends.sglang import engine
from dagrl.backends.sglang.section import SglangEngineSpec

RANKS = RankContext(0, 1, "127.0.0.1", 4000, 60, 1)
SHARE = ServerShare("generator/0", 0, 0, 1, ("2", "3"), RANKS, Path("logs"), 60, sleeps=False)


def test_free_memory_of_gpus_is_reported(monkeypatch) -> None:
    left = [GpuMemory("2", 12.04, 139.8), GpuMemory("3", 1.0, 139.8)]
    monkeypatch.setattr(engine, "gpu_memory", lambda gpus: left if gpus == ("2", "3") else [])
    spec = SglangEngineSpec(backend="sglang", group="rollout", server={"mem_fraction_static": 0.8})
    assert engine._memory(spec, SHARE) == (
        "; before it started, GPU 2 had 12.0 of 139.8 GiB free, GPU 3 had 1.0 of 139.8 GiB free, and "
        "mem_fraction_static is 0.8 of what is free"
    )


def test_nothing_is_reported_without_a_gpu() -> None:
    for gpus in ((), ("no-such-gpu",)):
        assert gpu_memory(gpus) == []
        assert gpu_names(gpus) == []


@pytest.mark.parametrize(("nodes", "prefix"), [(1, "generator-0"), (2, "generator-0-node0")])
def test_logs_are_named_after_the_server(nodes, prefix) -> None:
    share = replace(SHARE, nodes=nodes)
    assert share.log_prefix == Path("logs") / prefix
