"""What must be the same on all machines."""

from __future__ import annotations

import platform
from importlib import metadata

from dagrl import __version__


def versions() -> dict[str, str]:
    """Of what takes part in the conversation between machines."""
    return {"dagrl": __version__, "ray": metadata.version("ray"), "Python": platform.python_version()}


def difference(theirs: object, ours: dict[str, str]) -> str:
    """The first version that differs, in words; empty where none does."""
    given = theirs if isinstance(theirs, dict) else {}
    for name, version in ours.items():
        if given.get(name) != version:
            return f"{name} {given.get(name)}, and rank 0 has {version}"
    return ""
