"""Virtual environments of engines: checks of the packages that workers need. Reads files only."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from dagrl.backends.backend import Backend
from dagrl.backends.tested import version_of

_SAME = ("ray", "dagrl")
"""Distributions that must have the driver's versions, because workers and driver exchange their objects."""


def python_in(environment: Path) -> Path:
    """The interpreter of an environment. The link is not followed: Python finds its packages by it."""
    return environment / "bin" / "python"


def made_environments() -> dict[str, Path]:
    """Name -> folder of the environments beside the driver's: ``.venv-NAME`` beside ``.venv``."""
    own = Path(sys.prefix)
    pythons = sorted(own.parent.glob(f"{own.name}-*/bin/python"))
    return {path.parents[1].name.removeprefix(f"{own.name}-"): path.parents[1] for path in pythons}


def faults(environment: Path, backend: Backend[Any]) -> Iterator[tuple[str, str]]:
    """Yield the missing packages of an environment for workers of a backend, as a code and a message."""
    remedy = "build it with Python {}.{}, as docs/vllm.md describes".format(*sys.version_info)
    if not python_in(environment).exists():
        made = ", ".join(made_environments())
        known = f"; environments with a name are: {made}" if made else ""
        yield "no-environment", f"there is no {python_in(environment)}; {remedy}{known}"
        return
    sites = list(environment.glob("lib/python*/site-packages"))
    if f"python{sys.version_info.major}.{sys.version_info.minor}" not in {site.parent.name for site in sites}:
        has = ", ".join(site.parent.name for site in sites) or "no packages"
        yield "other-python", f"the environment has {has}; {remedy}"
        return
    for name in _SAME:
        wanted = metadata.version(name)
        if (version := version_of(name, environment)) != wanted:
            has = f"{name} {version}" if version else f"no {name}"
            yield (
                "other-version",
                f"the environment has {has}, and the driver {name} {wanted}; install that version in both",
            )
    for package in backend.requires:
        if not any((site / package).exists() for site in sites):
            yield (
                "package-missing",
                f"the environment lacks {package}, which backend {backend.name} needs; install it there",
            )
