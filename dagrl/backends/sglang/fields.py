"""``server:`` of an engine, held against the installed SGLang.

ServerArgs is read as text: importing sglang takes seconds and torch. Without SGLang nothing is checked here; it checks
once more, and more closely, when the server starts.
"""

from __future__ import annotations

from functools import cache

from dagrl.backends.backend import EngineCheck
from dagrl.backends.sglang.section import SglangEngineSpec
from dagrl.backends.sglang.unsupported import clashes_of
from dagrl.models.library_classes import check_fields, fields_of_class, source_of


def check_fields_of(check: EngineCheck[SglangEngineSpec]) -> None:
    """Report fields that SGLang does not have, that dagrl does not support, or that have a wrong value."""
    place = (*check.place, "server")
    refused = dict(clashes_of(check.engine))
    for field, reason in refused.items():
        check.findings.error((*place, field), reason)
    known = sglang_fields()
    if known is not None:
        given = {field: value for field, value in check.engine.server.items() if field not in refused}
        check_fields(place, given, known, "SGLang's ServerArgs", "SGLang", check.findings)


@cache
def sglang_fields() -> dict[str, str] | None:
    """Fields of ServerArgs -> their type as SGLang writes it; None without SGLang."""
    source = source_of("sglang", "srt/server_args.py")
    return _fields(source) if source else None


def _fields(source: str) -> dict[str, str] | None:
    """The fields stand before the methods, which are two thirds of a very long file."""
    start = source.find("\nclass ServerArgs:")
    end = source.find("\n    def ", start)
    return fields_of_class(source[start:end], "ServerArgs") or None
