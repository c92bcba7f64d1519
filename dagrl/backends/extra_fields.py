"""Validates ``extra:`` of an engine, whose fields are passed to the library without any other check."""

from __future__ import annotations

from typing import Any

from dagrl.backends.backend import EngineCheck
from dagrl.config.errors import listed
from dagrl.config.schema.library_fields import LibraryFields


def check_extra(check: EngineCheck[Any]) -> None:
    """Report fields that dagrl sets itself or that have a place in the file, and warn of the others once."""
    untested = []
    for section, given in check.engine.extra.items():
        table: type[LibraryFields] = type(check.engine).model_fields[section].annotation
        for field in given:
            place = (*check.place, "extra", section, field)
            if field in table.refused:
                check.findings.error(place, table.refused[field], code="refused-key")
            elif field in table.model_fields:
                check.findings.error(place, f"it is tested; move it to `{section}:` of the engine", code="tested-field")
            else:
                untested.append(field)
    if untested:
        message = f"not tested with dagrl: {listed(untested)}; compare the first steps with a run without them"
        check.findings.warning((*check.place, "extra"), message, code="untested-fields")
