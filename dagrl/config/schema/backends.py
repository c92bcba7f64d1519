"""Finds backends and the type of the ``engines`` section, which is the union of their sections.

A backend is a package with two modules: `section`, with a subclass of `EngineSpec`, and `descriptor`, with a `BACKEND`.
Folders of `dagrl/backends` are found by themselves; other packages name theirs in the entry point group
``dagrl.backends``: ``NAME = "package"``.
"""

from __future__ import annotations

import importlib
from functools import cache
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Union

from pydantic import Field, create_model, model_validator

from dagrl.config.schema.engine import EngineSpec

_PACKAGE = "dagrl.backends"


@cache
def backend_packages() -> dict[str, str]:
    """Name of each backend -> its package."""
    spec = find_spec(_PACKAGE)
    folders = [Path(folder) for folder in (spec.submodule_search_locations or ())] if spec else []
    own = sorted(path.parent.name for folder in folders for path in folder.glob("*/descriptor.py"))
    return {name: f"{_PACKAGE}.{name}" for name in own} | {
        entry.name: entry.value for entry in entry_points(group=_PACKAGE)
    }


@cache
def engine_sections() -> dict[str, type[EngineSpec]]:
    """Name of each backend -> its section."""
    return {name: _section(name, package) for name, package in backend_packages().items()}


def broken_backends() -> dict[str, str]:
    """Name of each backend that cannot be imported -> why."""
    return {name: section.broken for name, section in engine_sections().items() if issubclass(section, _BrokenSection)}


def why_broken(name: str, package: str, error: Exception) -> str:
    """The sentence about a backend that cannot be imported."""
    what = " ".join(f"{type(error).__name__}: {error}".split())
    return f"the backend `{name}` cannot be imported ({what}); update or uninstall the package `{package}`"


class _BrokenSection(EngineSpec):
    """Takes the place of the section of a backend that cannot be imported: an error in files that use it."""

    broken: ClassVar[str]

    @model_validator(mode="before")
    @classmethod
    def _refuse(cls, value: object) -> object:
        raise ValueError(cls.broken)


def _section(name: str, package: str) -> type[EngineSpec]:
    try:
        module = importlib.import_module(f"{package}.section")
    except Exception as error:  # Importing another package may raise anything; `why_broken` names it.
        if package.startswith(f"{_PACKAGE}."):
            raise
        section = create_model(f"Broken{name.title()}", __base__=_BrokenSection, backend=(Literal[name], ...))  # type: ignore[arg-type]
        section.broken = why_broken(name, package, error)
        return section
    for value in vars(module).values():
        if isinstance(value, type) and issubclass(value, EngineSpec) and value.__module__ == module.__name__:
            return value
    raise ImportError(f"{module.__name__} has no subclass of EngineSpec for the backend {name!r}")


if TYPE_CHECKING:
    AnyEngineSpec = EngineSpec
else:
    AnyEngineSpec = Annotated[Union[tuple(engine_sections().values())], Field(discriminator="backend")]  # noqa: UP007
