"""Checks Python, the packages that dagrl requires, and the backends."""

from __future__ import annotations

import importlib.util
import platform
import subprocess
import sys
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

from dagrl.backends.environments import faults, made_environments
from dagrl.backends.registry import backends
from dagrl.config.errors import counted
from dagrl.config.schema.backends import broken_backends
from dagrl.doctor.findings import Finding, hint, missing, ok
from dagrl.imports import distributions_of

_IMPORT_TIMEOUT_S = 180
_CUDA = "import torch; print(torch.version.cuda, torch.cuda.device_count())"


def software(*, on_gpus: bool) -> Iterator[Finding]:
    """Check what is installed.

    Compiled libraries that depend on others, such as torch on CUDA, are imported in another process, which takes
    seconds. Importing the rest would take half a minute, so their requirements are compared with installed versions.
    """
    yield ok("Python", platform.python_version())
    yield from _packages()
    needs = {
        backend: (*backend.requires, *(backend.gpu_requires if on_gpus else ())) for backend in backends().values()
    }
    compiled = {package for backend in needs for package in backend.gpu_requires} if on_gpus else set()
    errors = _import_errors({"torch", "ray"} | compiled)
    for name in ("torch", "ray"):
        yield missing(name, f"cannot be imported: {errors[name]}") if name in errors else ok(name, "can be imported")
    yield from _bytecode()
    if on_gpus and "torch" not in errors:
        yield _cuda()
    for name, why in broken_backends().items():
        yield missing(f"backend {name}", why)
    made = made_environments()
    for backend, packages in needs.items():
        name = f"backend {backend.name}"
        ready = [environment for environment, folder in made.items() if not list(faults(folder, backend))]
        if not all(map(_is_installed, packages)) and ready:
            yield ok(name, f"ready with `environment: {ready[0]}`; {backend.summary}")
        elif absent := [package for package in packages if not _is_installed(package)]:
            judge = missing if set(absent) & set(backend.gpu_requires) else hint
            yield judge(name, f"not ready, {', '.join(absent)} is not installed; {backend.summary}")
        elif broken := next((package for package in packages if package in errors), None):
            yield missing(name, f"not ready, {broken} cannot be imported: {errors[broken]}")
        elif backend.tested and (untested := backend.tested.problem(None, on_gpus=on_gpus)):
            yield hint(name, untested)
        elif unmet := [lack for package in packages for lack in _unmet(package)]:
            # It may work even with a version that its requirements exclude.
            judge = missing if any(absent for absent, _ in unmet) else hint
            yield judge(name, f"{'; '.join(text for _, text in unmet)}; {backend.summary}")
        else:
            yield ok(name, f"ready; {backend.summary}")
    for environment, folder in made.items():
        lacks = {message for backend in needs for code, message in faults(folder, backend) if code != "package-missing"}
        problems = [backend.tested.problem(folder, on_gpus=on_gpus) for backend in needs if backend.tested]
        if lacks:
            yield missing(f"environment {environment}", sorted(lacks)[0])
        elif problem := next(filter(None, problems), None):
            yield hint(f"environment {environment}", problem)
        else:
            yield ok(f"environment {environment}", str(folder))


def _import_errors(packages: Iterable[str]) -> dict[str, str]:
    """Package -> reason why it cannot be imported. Imports all at once, and one by one after a failure."""
    installed = sorted(package for package in packages if _is_installed(package))
    if not run_python(f"import {', '.join(installed)}")[1]:
        return {}
    errors = {package: run_python(f"import {package}")[1] for package in installed}
    return {package: error for package, error in errors.items() if error}


def _bytecode() -> Iterator[Finding]:
    """Warn if Python's cache of compiled modules is switched off, as in many images."""
    torch = importlib.util.find_spec("torch")
    if sys.dont_write_bytecode and torch and torch.cached and not Path(torch.cached).is_file():
        text = "each process compiles all libraries again, which takes seconds; unset PYTHONDONTWRITEBYTECODE"
        yield hint("bytecode", text)


def _is_installed(package: str) -> bool:
    return importlib.util.find_spec(package.partition(".")[0]) is not None


def run_python(code: str) -> tuple[str, str]:
    """Run code in another process, since libraries can crash; returns its output, and its error in one line."""
    try:
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=_IMPORT_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return "", f"takes more than {_IMPORT_TIMEOUT_S} s"
    if done.returncode == 0:
        return done.stdout.strip(), ""
    lines = done.stderr.strip().splitlines()
    return "", lines[-1][:200] if done.returncode == 1 and lines else f"Python ends with exit code {done.returncode}"


def _unmet(package: str) -> Iterator[tuple[bool, str]]:
    """Yield unmet requirements of a package's distribution: whether the required one is absent, and a message."""
    module = f"{package.replace('.', '/')}/__init__.py"
    for distribution in distributions_of(package.partition(".")[0]):
        # Several distributions may share a namespace.
        if module not in (metadata.distribution(distribution).read_text("RECORD") or ""):
            continue
        for requirement, version in _not_met(_requirements(distribution)):
            has = f"{version} is installed" if version else "it is not installed"
            yield (
                not version,
                f"{distribution} needs {requirement.name} {requirement.specifier}, and {has}".replace(" ,", ","),
            )


def _packages() -> Iterator[Finding]:
    """Compare the installed versions with dagrl's requirements."""
    try:
        required = _requirements("dagrl")
    except metadata.PackageNotFoundError:
        yield hint("packages", "dagrl is not installed as a package, so its requirements are not known")
        return
    wrong = list(_not_met(required))
    for requirement, version in wrong:
        has = version or "not installed"
        yield missing(requirement.name, f"{has}; dagrl needs {requirement.specifier or 'it'}: `make setup` installs it")
    if not wrong:
        yield ok("packages", f"all {len(required)} that dagrl requires have versions it works with")


def _requirements(distribution: str) -> list[Requirement]:
    """Return the requirements of a distribution on this machine, without its extras. Raises PackageNotFoundError."""
    required = [Requirement(text) for text in metadata.requires(distribution) or ()]
    return [
        requirement
        for requirement in required
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""})
    ]


def _not_met(required: Iterable[Requirement]) -> Iterator[tuple[Requirement, str]]:
    """Yield unmet requirements with the installed version; empty if absent."""
    for requirement in required:
        try:
            version = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            version = ""
        if not version or not requirement.specifier.contains(version, prereleases=True):
            yield requirement, version


def _cuda() -> Finding:
    output, error = run_python(_CUDA)
    cuda, _, count = output.partition(" ")
    if error or count == "0":
        built = error or ("built without CUDA" if cuda == "None" else f"built for CUDA {cuda}")
        return missing("torch and CUDA", f"torch, {built}, sees none of the GPUs; is the driver old enough?")
    return ok("torch and CUDA", f"CUDA {cuda}, {counted(int(count), 'GPU')}")
