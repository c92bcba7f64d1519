"""Tested versions of a library; others are refused before engines start."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path


@dataclass(frozen=True, slots=True)
class LibraryVersions:
    """Tested versions of one library."""

    title: str
    distributions: tuple[str, ...]
    """Names of its builds; the first installed one counts."""
    on_gpus: tuple[str, ...]
    on_cpus: tuple[str, ...]
    remedy: str
    """Instructions to install one of them."""

    def problem(self, environment: Path | None, *, on_gpus: bool, allow_untested: bool = False) -> str | None:
        """Return the reason why the version in an environment, or in this one, is refused; None if it is accepted or
        absent.

        A post-release, and a build of a version with a label, count as that version.
        """
        installed = next(filter(None, (version_of(name, environment) for name in self.distributions)), None)
        tested = self.on_gpus if on_gpus else self.on_cpus
        if installed is None or allow_untested:
            return None
        if any(f"{installed.partition('+')[0]}.".startswith(f"{version}.") for version in tested):
            return None
        where = "GPUs" if on_gpus else "CPUs"
        return (
            f"{self.title} {installed} is installed, and dagrl was tested on {where} with {' and '.join(tested)}; "
            f"{self.remedy}, or set `allow_untested: true` in the engine"
        )


def version_of(distribution: str, environment: Path | None = None) -> str | None:
    """Return the version of a distribution in a virtual environment, or in this one; None if it is not installed."""
    sites = sys.path if environment is None else [str(site) for site in environment.glob("lib/python*/site-packages")]
    return next((each.version for each in metadata.distributions(name=distribution, path=sites)), None)
