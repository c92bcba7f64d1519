"""Checks Python, the packages that dagrl requires, and the backends."""

from __future__ import annotations

import importlib.util
import platform
import subprocess
import sys
from collections.abc import Iterable, Iterator
from importlib import metadata

from packaging.requirements import Requirement

from dagrl.backends.environments import faults, made_environments
from dagrl.backends.registry import backends
from dagrl.config.schema.backends import broken_backends
from dagrl.doctor.findings import Finding, hint, missing, ok

_IMPORT_TIMEOUT_S = 180
_CUDA = "import torch; print(torch.version.cuda, torch.cuda.device_count())"


def software(*, on_gpus: bool) -> Iterator[Finding]:
    """Check what is installed. Slow: imports all packages, in another process."""
    yield ok("Python", platform.python_version())
    yield from _packages()
    needs = {
        backend: (*backend.requires, *(backend.gpu_requires if on_gpus else ())) for backend in backends().values()
    }
    errors = _import_errors({"torch", "ray"}.union(*needs.values()))
    for name in ("torch", "ray"):
        yield missing(name, f"cannot be imported: {errors[name]}") if name in errors else ok(name, "can be imported")
    if on_gpus and "torch" not in errors:
        yield _cuda()
    for name, why in broken_backends().items():
        yield missing(f"backend {name}", why)
    made = made_environments()
    for backend, packages in needs.items():
        name = f"backend {backend.name}"
        ready = [each for each, folder in made.items() if not list(faults(folder, backend))]
        if not all(map(_is_installed, packages)) and ready:
            yield ok(name, f"ready with `environment: {ready[0]}`; {backend.summary}")
        elif absent := [package for package in packages if not _is_installed(package)]:
            judge = missing if set(absent) & set(backend.gpu_requires) else hint
            yield judge(name, f"not ready, {', '.join(absent)} is not installed; {backend.summary}")
        elif broken := next((package for package in packages if package in errors), None):
            yield missing(name, f"not ready, {broken} cannot be imported: {errors[broken]}")
        else:
            yield ok(name, f"ready; {backend.summary}")
    for each, folder in made.items():
        lacks = {message for backend in needs for code, message in faults(folder, backend) if code != "package-missing"}
        yield missing(f"environment {each}", sorted(lacks)[0]) if lacks else ok(f"environment {each}", str(folder))


def _import_errors(packages: Iterable[str]) -> dict[str, str]:
    """Package -> why it cannot be imported. All at once if they can, else one by one."""
    installed = sorted(package for package in packages if _is_installed(package))
    if not run_python(f"import {', '.join(installed)}")[1]:
        return {}
    errors = {package: run_python(f"import {package}")[1] for package in installed}
    return {package: error for package, error in errors.items() if error}


def _is_installed(package: str) -> bool:
    return importlib.util.find_spec(package.partition(".")[0]) is not None


def run_python(code: str) -> tuple[str, str]:
    """Run code in another process, since libraries can crash: its output, and its error in one line."""
    try:
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=_IMPORT_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return "", f"takes more than {_IMPORT_TIMEOUT_S} s"
    if done.returncode == 0:
        return done.stdout.strip(), ""
    lines = done.stderr.strip().splitlines()
    return "", lines[-1][:200] if done.returncode == 1 and lines else f"Python ends with exit code {done.returncode}"


def _packages() -> Iterator[Finding]:
    """Compare the installed versions with those that dagrl requires."""
    try:
        required = [Requirement(text) for text in metadata.requires("dagrl") or ()]
    except metadata.PackageNotFoundError:
        yield hint("packages", "dagrl is not installed as a package, so its requirements are not known")
        return
    required = [each for each in required if each.marker is None or each.marker.evaluate({"extra": ""})]
    wrong = 0
    for each in required:
        try:
            version = metadata.version(each.name)
        except metadata.PackageNotFoundError:
            version = "not installed"
        if version == "not installed" or not each.specifier.contains(version, prereleases=True):
            wrong += 1
            yield missing(each.name, f"{version}; dagrl needs {each.specifier or 'it'}: `make setup` installs it")
    if not wrong:
        yield ok("packages", f"all {len(required)} that dagrl requires have versions it works with")


def _cuda() -> Finding:
    output, error = run_python(_CUDA)
    cuda, _, count = output.partition(" ")
    if error or count == "0":
        built = error or ("built without CUDA" if cuda == "None" else f"built for CUDA {cuda}")
        return missing("torch and CUDA", f"torch, {built}, sees none of the GPUs; is the driver old enough?")
    return ok("torch and CUDA", f"CUDA {cuda}, {count} GPUs")
