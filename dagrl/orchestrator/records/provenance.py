"""Which code a run is made of: versions of libraries, and a hash of the sources."""

from __future__ import annotations

import hashlib
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from dagrl.version import __version__

_PACKAGES = ("torch", "megatron-core", "transformer-engine", "transformers", "sglang", "vllm", "numpy", "ray")
_DAGRL = Path(__file__).parents[2]


def versions() -> dict[str, str]:
    """The versions that results may depend on."""
    found = {"dagrl": __version__, "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def code_hash(modules: Path | None) -> str:
    """A hash of dagrl's sources, and of the Python files in the folder of the user's modules."""
    digest = hashlib.blake2b(digest_size=8)
    files = sorted(_DAGRL.rglob("*.py")) + (sorted(modules.glob("*.py")) if modules is not None else [])
    for file in files:
        digest.update(file.name.encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()
