"""Versions of a library that was not tested are refused, with those that were."""

from __future__ import annotations

import sys
from importlib import metadata
from pathlib import Path

import pytest

from dagrl.backends.registry import backends
from dagrl.backends.tested import LibraryVersions, version_of

LIBX = LibraryVersions("LibX", ("libx", "libx-cpu"), ("0.5.17",), ("0.5.17", "0.5.23"), "install it")


def install(folder: Path, **versions: str) -> Path:
    site = folder / "lib" / "python3.12" / "site-packages"
    for name, version in versions.items():
        (site / f"{name}-{version}.dist-info").mkdir(parents=True)
        (site / f"{name}-{version}.dist-info" / "METADATA").write_text(f"Name: {name}\nVersion: {version}\n")
    return folder


@pytest.mark.parametrize(
    ("name", "version", "on_gpus"),
    [
        ("libx", "0.5.23", True),
        ("libx", "0.5.170", False),
        ("libx", "0.5.1", False),
        ("libx", "0.5.18.post1", False),
        ("libx_cpu", "0.5.1+cpu", False),
        ("libx", "0.6.0.dev3+g0123", False),
    ],
)
def test_others_are_refused(tmp_path, name, version, on_gpus) -> None:
    folder = install(tmp_path, **{name: version})
    problem = LIBX.problem(folder, on_gpus=on_gpus)
    tested = "GPUs with 0.5.17;" if on_gpus else "CPUs with 0.5.17 and 0.5.23;"
    assert problem is not None
    assert problem.startswith(f"LibX {version} is installed, and dagrl was tested on {tested} install it, or set")
    assert LIBX.problem(folder, on_gpus=on_gpus, allow_untested=True) is None


@pytest.mark.parametrize("versions", [{"libx": "0.5.17"}, {"libx": "0.5.17.post1"}, {"libx_cpu": "0.5.23+cpu"}, {}])
def test_builds_of_tested_ones_are_taken(tmp_path, versions) -> None:
    assert LIBX.problem(install(tmp_path, **versions), on_gpus=False) is None


def test_without_an_environment_it_is_that_of_this_one(tmp_path, monkeypatch) -> None:
    assert version_of("pytest") == metadata.version("pytest")
    monkeypatch.setattr(sys, "path", [str(install(tmp_path, libx="1.0") / "lib/python3.12/site-packages")])
    assert LIBX.problem(None, on_gpus=True) is not None


def test_each_version_on_gpus_was_tested_on_cpus() -> None:
    for backend in backends().values():
        if backend.tested is not None:
            assert set(backend.tested.on_gpus) <= set(backend.tested.on_cpus)
