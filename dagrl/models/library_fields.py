"""What a pipeline file says of fields of a library's config class, held against what the class has.

The library's own checks come later, and look closer; these know names and plain types, and the nearest right name.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from typing import Any

from dagrl.config.errors import Place, nearest, shown, suggest
from dagrl.config.loading.positions import Findings
from dagrl.models.number_formats import NUMBER_FORMATS

_PLAIN_TYPES: dict[str, tuple[tuple[type, ...], str]] = {
    "int": ((int,), "a whole number"),
    "float": ((int, float), "a number"),
    "bool": ((bool,), "true or false"),
    "str": ((str,), "text"),
}
_LISTS: dict[str, tuple[type, str, str]] = {
    "list[str]": (str, "a list of names", "`[one, two]`"),
    "list[int]": (int, "a list of whole numbers", "`[1, 2]`"),
}


def check_fields(
    place: Place, given: Mapping[str, Any], known: Mapping[str, str], owner: str, library: str, findings: Findings
) -> None:
    """Report names that are not `known`, and values of another type than the class `owner` of `library` says."""
    check_names(place, given, known, owner, library, findings)
    for field, value in given.items():
        inner: Place = (*place, field)
        if field not in known:
            continue
        if known[field] == "torch.dtype":
            if not isinstance(value, str) or value not in NUMBER_FORMATS:
                findings.error(inner, f"{shown(value)} is no number format; {suggest(str(value), NUMBER_FORMATS)}")
        elif "Callable" in known[field]:
            findings.error(inner, "takes a function, which a pipeline file cannot hold; take it out")
        elif known[field] in _PLAIN_TYPES:
            types, words = _PLAIN_TYPES[known[field]]
            if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
                findings.error(inner, f"expected {words}, got {shown(value)}; write {words}")
        elif known[field].lower() in _LISTS:
            entry, words, example = _LISTS[known[field].lower()]
            if not isinstance(value, list) or not all(isinstance(each, entry) for each in value):
                findings.error(inner, f"expected {words}, got {shown(value)}; write {example}")
        elif (options := _options(known[field])) and value not in options:
            findings.error(inner, f"{shown(value)} is not known here; {suggest(str(value), map(str, options))}")


def check_names(
    place: Place, given: Iterable[str], known: Mapping[str, str], owner: str, library: str, findings: Findings
) -> None:
    """Report names that are not fields of the class `owner` of `library`."""
    for field in given:
        if field not in known:
            findings.error((*place, field), f"{owner} has no field `{field}`; {_near(field, known, library)}")


def _options(annotation: str) -> tuple[Any, ...]:
    """What a ``Literal`` type allows; nothing for another type."""
    if not annotation.startswith("Literal[") or annotation.count("[") > 1:
        return ()
    return ast.literal_eval(f"({annotation.removeprefix('Literal[').removesuffix(']')},)")


def _near(field: str, known: Mapping[str, str], library: str) -> str:
    # All of the hundreds of names would help nobody.
    return suggest(field, known) if nearest(field, known) else f"look the name up in {library}, or take it out"
