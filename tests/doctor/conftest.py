from __future__ import annotations

import shutil
import sys
from collections import namedtuple

import pytest

from dagrl.doctor import hardware, network, software

GIB = 2**30
Usage = namedtuple("Usage", "total used free")


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine on which all is well, without GPUs, whatever this one is like."""
    for name in ("RAY_ADDRESS", "CUDA_VISIBLE_DEVICES", "PET_NNODES", "PET_NODE_RANK", "PET_MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: Usage(1000 * GIB, 100 * GIB, 900 * GIB))
    monkeypatch.setattr(hardware.sandbox, "run", lambda code: None)
    monkeypatch.setattr(network, "running_here", lambda: None)
    monkeypatch.setattr(network, "connect", lambda address: None)
    monkeypatch.setattr(software.metadata, "requires", lambda package: ["ray<2.61,>=2.60", 'x==1; extra == "x"'])
    monkeypatch.setattr(software.metadata, "version", lambda package: "2.60.0")
    monkeypatch.setattr(software, "_is_installed", lambda package: True)
    monkeypatch.setattr(software, "made_environments", dict)
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    monkeypatch.setattr(software, "run_python", lambda code: ("12.9 1", ""))
