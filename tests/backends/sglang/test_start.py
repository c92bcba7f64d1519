"""What is said of a server that cannot start; what needs SGLang for that is in `test_engine.py`."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from dagrl.backends.serving.client import ServerError
from dagrl.backends.serving.gpu_memory import GpuMemory, gpu_memory, gpu_names
from dagrl.backends.sglang import start
from dagrl.backends.sglang.section import SglangEngineSpec
from dagrl.backends.sglang.share import ServerShare
from dagrl.config.schema import ModelSpec

SHARE = ServerShare("generator/0", 0, 0, 1, ("2", "3"), "127.0.0.1", 4000, Path("logs"), 60)


def start_with_sglang(version: str | None, monkeypatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: version)
    monkeypatch.setitem(sys.modules, "sglang", SimpleNamespace(__version__=version))
    monkeypatch.setattr(start, "_positions", lambda model: 64)
    for switch in ("MEMORY_SAVER_CUDA_GRAPH", "BLOCK_NONZERO_RANK_CHILDREN", "ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"):
        monkeypatch.setenv(f"SGLANG_{switch}", "0")  # to be as it was afterwards
    spec = SglangEngineSpec(backend="sglang", group="rollout")
    model = ModelSpec(path=Path("no-such-model"))
    start.start_server(model, spec, SHARE, seed=0, sleeps=False)


@pytest.mark.parametrize(
    ("version", "fault"),
    [
        (None, "SGLang is not installed; install it with `uv pip install -r requirements/sglang.txt`"),
        ("0.5.23", "SGLang 0.5.23 is installed, but dagrl needs 0.5.17; install it with"),
        ("0.5.170", "SGLang 0.5.170 is installed, but dagrl needs 0.5.17; install it with"),
    ],
)
def test_a_missing_or_other_sglang_is_reported_with_a_remedy(version, fault, monkeypatch) -> None:
    with pytest.raises(ServerError, match=re.escape(fault)):
        start_with_sglang(version, monkeypatch)


@pytest.mark.parametrize("version", ["0.5.17", "0.5.17.post1"])
def test_builds_of_the_right_sglang_are_taken(version, monkeypatch) -> None:
    def start_here(*_: object, **__: object) -> None:
        raise LookupError("the version is right")

    monkeypatch.setattr(start, "server_arguments", start_here)
    with pytest.raises(LookupError, match="the version is right"):
        start_with_sglang(version, monkeypatch)


def test_free_memory_of_gpus_is_reported(monkeypatch) -> None:
    left = [GpuMemory("2", 12.04, 139.8), GpuMemory("3", 1.0, 139.8)]
    monkeypatch.setattr(start, "gpu_memory", lambda gpus: left if gpus == ("2", "3") else [])
    spec = SglangEngineSpec(backend="sglang", group="rollout", server={"mem_fraction_static": 0.8})
    assert start._memory(spec, SHARE) == (
        "; before it started, GPU 2 had 12.0 of 139.8 GiB free, GPU 3 had 1.0 of 139.8 GiB free, and "
        "mem_fraction_static is 0.8 of what is free"
    )


def test_nothing_is_reported_without_a_gpu() -> None:
    for gpus in ((), ("no-such-gpu",)):
        assert gpu_memory(gpus) == []
        assert gpu_names(gpus) == []


@pytest.mark.parametrize(("nodes", "prefix"), [(1, "generator-0"), (2, "generator-0-node0")])
def test_logs_are_named_after_the_server(nodes, prefix) -> None:
    share = ServerShare("generator/0", 0, 0, nodes, (), "127.0.0.1", 4000, Path("logs"), 60)
    assert share.log_prefix == Path("logs") / prefix
