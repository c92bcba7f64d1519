"""Validates ``extra:`` of an engine, by the fields that the installed library has."""

from __future__ import annotations

from collections.abc import Container
from pathlib import Path
from typing import Any

from dagrl.backends.backend import EngineCheck
from dagrl.config.errors import listed, removal
from dagrl.config.schema.library_fields import LibraryFields, meant_fields
from dagrl.model_files.library_classes import LibraryClass, arguments_of_class


def check_extra(check: EngineCheck[Any], *, open_sections: Container[str] = ()) -> None:
    """Report fields that dagrl sets itself, that have a place in the file, or that the library lacks.

    Warn once of the others, of fields of an unknown class, and of fields of `open_sections`, whose class depends on the
    model.
    """
    untested = []
    for section, given in check.engine.extra.items():
        table: type[LibraryFields] = type(check.engine).model_fields[section].annotation
        for field in given:
            place = (*check.place, "extra", section, field)
            if field in table.refused:
                check.findings.error(place, table.refused[field], code="refused-key")
            elif field in table.model_fields:
                check.findings.error(place, f"it is tested; move it to `{section}:` of the engine", code="tested-field")
            elif section not in open_sections and (lack := lacking_field(table, field, check.engine.environment)):
                check.findings.error(place, lack, code="unknown-field")
            else:
                untested.append(field)
    if untested:
        message = f"not tested with dagrl: {listed(untested)}; compare the first steps with a run without them"
        check.findings.warning((*check.place, "extra"), message, code="untested-fields")


def lacking_field(table: type[LibraryFields], field: str, environment: Path | None) -> str | None:
    """The message that the library in an environment lacks a field, with a suggestion; None unless this is certain."""
    library = LibraryClass(*table.library_class)
    known = arguments_of_class(library, environment)
    # A class that collects its fields from others at import declares none itself, so none of its names can be checked.
    if not known or field in known:
        return None
    lack, meant = f"{library.name} of {library.package} has no such field", meant_fields(table, field, known)
    return f"{lack}; {meant}" if meant else removal(lack)
