"""Checks of packages and backends."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec

import pytest

from dagrl.backends.registry import backends
from dagrl.doctor import software
from dagrl.doctor.findings import Verdict

RUN_PYTHON = software.run_python


def found(name: str, *, on_gpus: bool = False) -> tuple[Verdict, str]:
    return next((each.verdict, each.text) for each in software.software(on_gpus=on_gpus) if each.name == name)


def test_each_registered_backend_is_ready_where_all_is_installed() -> None:
    findings = {each.name: each for each in software.software(on_gpus=True)}
    assert {each.verdict for each in findings.values()} == {Verdict.OK}
    assert backends()
    for backend in backends().values():
        assert findings[f"backend {backend.name}"].text == f"ready; {backend.summary}"
    assert findings["torch and CUDA"].text == "CUDA 12.9, 1 GPU"


@pytest.mark.parametrize(("off", "cached"), [(True, False), (True, True), (False, False)])
def test_processes_that_compile_all_libraries_anew_are_a_hint(
    monkeypatch, tmp_path, *, off: bool, cached: bool
) -> None:
    (tmp_path / "torch.pyc").touch()
    torch = ModuleSpec("torch", None)
    torch.cached = str(tmp_path / "torch.pyc") if cached else str(tmp_path / "no.pyc")
    find = software.importlib.util.find_spec
    monkeypatch.setattr(software.importlib.util, "find_spec", lambda name: torch if name == "torch" else find(name))
    monkeypatch.setattr(sys, "dont_write_bytecode", off)
    texts = [each.text for each in software.software(on_gpus=False) if each.name == "bytecode"]
    assert [("PYTHONDONTWRITEBYTECODE" in text) for text in texts] == ([True] if off and not cached else [])


@pytest.mark.parametrize("name", backends())
def test_a_backend_whose_package_is_not_installed_is_a_hint(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    package = backends()[name].requires[0]
    monkeypatch.setattr(software, "_is_installed", lambda each: each != package)
    verdict, text = found(f"backend {name}")
    assert verdict is Verdict.HINT and text.startswith(f"not ready, {package} is not installed")


def test_packages_for_gpus_are_required_on_gpus_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    name, package = next((each.name, each.gpu_requires[0]) for each in backends().values() if each.gpu_requires)
    monkeypatch.setattr(software, "_is_installed", lambda each: each != package)
    assert found(f"backend {name}")[0] is Verdict.OK
    verdict, text = found(f"backend {name}", on_gpus=True)
    assert verdict is Verdict.MISSING and text.startswith(f"not ready, {package} is not installed")


def test_a_compiled_package_that_cannot_be_imported_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    name, package = next((each.name, each.gpu_requires[0]) for each in backends().values() if each.gpu_requires)
    error = "ImportError: libcudart.so.12"
    monkeypatch.setattr(software, "run_python", lambda code: ("13.0 2", error if package in code else ""))
    told = f"not ready, {package} cannot be imported: {error}"
    assert found(f"backend {name}", on_gpus=True) == (Verdict.MISSING, told)
    assert found("torch", on_gpus=True)[0] is Verdict.OK


@pytest.mark.parametrize(
    ("version", "verdict", "has"),
    [("", Verdict.MISSING, "it is not installed"), ("1.0", Verdict.HINT, "1.0 is installed")],
)
def test_requirements_of_a_backends_package_are_compared(
    version: str, verdict: Verdict, has: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def installed(package: str) -> str:
        if package == "helper" and not version:
            raise software.metadata.PackageNotFoundError(package)
        return version if package == "helper" else "2.60.0"

    needs = {"megatron-core": ["helper>=2"]}
    monkeypatch.setattr(software.metadata, "requires", lambda package: needs.get(package, ["ray"]))
    monkeypatch.setattr(software.metadata, "version", installed)
    judged, text = found("backend megatron")
    assert judged is verdict and text.startswith(f"megatron-core needs helper >=2, and {has}; ")
    assert found("backend hf")[0] is Verdict.OK


def test_only_compiled_packages_are_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them took half a minute."""
    ran: list[str] = []
    monkeypatch.setattr(software, "run_python", lambda code: ran.append(code) or ("", ""))
    list(software.software(on_gpus=False))
    assert ran == ["import ray, torch"]


def test_torch_that_cannot_be_imported_or_sees_no_gpu_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(software, "run_python", lambda code: ("None 0", ""))
    verdict, text = found("torch and CUDA", on_gpus=True)
    assert verdict is Verdict.MISSING and "torch, built without CUDA, sees none of the GPUs" in text
    monkeypatch.setattr(software, "run_python", lambda code: ("", "OSError: libcuda.so" if "torch" in code else ""))
    assert found("torch", on_gpus=True) == (Verdict.MISSING, "cannot be imported: OSError: libcuda.so")


@pytest.mark.parametrize(
    ("version", "text"), [("2.59.0", "2.59.0; dagrl needs <2.61,>=2.60"), (None, "not installed; dagrl needs <2.61")]
)
def test_packages_of_other_versions_are_missing(
    version: str | None, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def installed(package: str) -> str:
        if version is None:
            raise software.metadata.PackageNotFoundError(package)
        return version

    monkeypatch.setattr(software.metadata, "version", installed)
    verdict, told = found("ray")
    assert verdict is Verdict.MISSING and told.startswith(text)


def test_requirements_are_unknown_where_dagrl_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(package: str) -> list[str]:
        raise software.metadata.PackageNotFoundError(package)

    monkeypatch.setattr(software.metadata, "requires", fail)
    assert found("packages")[0] is Verdict.HINT


def test_code_runs_in_a_process_that_may_crash() -> None:
    assert RUN_PYTHON("print(1)") == ("1", "")
    assert RUN_PYTHON("raise OSError('libfoo.so: no such file')") == ("", "OSError: libfoo.so: no such file")
    assert RUN_PYTHON("import os; os._exit(11)") == ("", "Python ends with exit code 11")
