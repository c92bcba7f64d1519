"""Which code a run is made of: versions of libraries, and a hash of the sources."""

from __future__ import annotations

import hashlib
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from dagrl.backends.registry import backends
from dagrl.version import __version__

_PACKAGES = ("torch", "transformers", "numpy", "ray")
_DAGRL = Path(__file__).parents[2]


def versions() -> dict[str, str]:
    """The versions that results may depend on."""
    versions_of = {"dagrl": __version__, "python": platform.python_version()}
    of_backends = {name for backend in backends().values() for name in (*backend.requires, *backend.gpu_requires)}
    # A package such as megatron.core is distributed as megatron-core.
    for package in (*_PACKAGES, *sorted(name.replace(".", "-") for name in of_backends)):
        try:
            versions_of[package] = version(package)
        except PackageNotFoundError:
            continue
    return versions_of


def code_hash(modules: Path | None) -> str:
    """A hash of dagrl's sources, and of the Python files in the folder of the user's modules."""
    digest = hashlib.blake2b(digest_size=8)
    files = sorted(_DAGRL.rglob("*.py")) + (sorted(modules.glob("*.py")) if modules is not None else [])
    for file in files:
        digest.update(file.name.encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()
