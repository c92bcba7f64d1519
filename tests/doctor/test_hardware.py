"""Checks of GPUs, memory, disks and the sandbox."""

from __future__ import annotations

import shutil
from collections import namedtuple
from pathlib import Path

import pytest

from dagrl.doctor import hardware
from dagrl.doctor.findings import Verdict
from dagrl.doctor.hardware import DetectedGpu, list_gpus

GIB = 2**30
Usage = namedtuple("Usage", "total used free")
IDLE = DetectedGpu("0", "NVIDIA H200", 143771, 4, "570.124")
BUSY = DetectedGpu("0", "NVIDIA H200", 143771, 40960, "570.124")


def found(name: str, gpus: list[DetectedGpu]) -> tuple[Verdict, str]:
    return next((each.verdict, each.text) for each in hardware.hardware(gpus) if each.name == name)


def test_a_machine_with_an_idle_gpu_is_ok() -> None:
    findings = list(hardware.hardware([IDLE]))
    assert {each.verdict for each in findings} == {Verdict.OK}
    assert found("GPU 0", [IDLE]) == (Verdict.OK, "NVIDIA H200, 140 GiB, driver 570.124")
    assert "cores" in found("processor", [IDLE])[1]


def test_gpus_that_are_in_use_hidden_or_not_there_are_hints(monkeypatch: pytest.MonkeyPatch) -> None:
    verdict, text = found("GPU 0", [BUSY])
    assert verdict is Verdict.HINT and "40.0 GiB are in use" in text
    verdict, text = found("GPUs", [])
    assert verdict is Verdict.HINT and "groups of CPU slots (cpus_per_node) run here" in text
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    verdict, text = found("CUDA_VISIBLE_DEVICES", [IDLE])
    assert verdict is Verdict.HINT and "is `0`" in text


def test_folders_with_little_space_are_hints(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: Usage(2 * GIB, GIB, GIB))
    verdict, text = found("shared memory", [])
    assert verdict is Verdict.HINT and text.startswith("1.0 of 2 GiB free in /dev/shm; start Docker with --shm-size")
    assert found("disk for runs", [])[0] is found("temporary files", [])[0] is Verdict.HINT


def test_a_folder_that_is_not_there_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(folder: str) -> None:
        raise FileNotFoundError(folder)

    monkeypatch.setattr(shutil, "disk_usage", fail)
    assert found("shared memory", []) == (Verdict.MISSING, "there is no /dev/shm")


def test_a_sandbox_that_cannot_confine_is_a_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(code: str) -> None:
        raise OSError("the kernel has no Landlock")

    monkeypatch.setattr(hardware.sandbox, "run", fail)
    verdict, text = found("sandbox", [])
    assert verdict is Verdict.HINT and text.startswith("the kernel has no Landlock; only `fn: code`")


def test_nvidia_smi_lists_the_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    smi = tmp_path / "nvidia-smi"
    smi.write_text('#!/bin/sh\necho "0, NVIDIA H200, 143771, 4, 570.124"\n')
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert list_gpus() == [IDLE]
    smi.write_text("#!/bin/sh\necho 'NVIDIA-SMI has failed'; exit 9\n")
    assert list_gpus() == []
    smi.unlink()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert list_gpus() == []
