"""Fields of a library's config class, read from its source as text: importing the library would import torch.

The library's own checks come later, and look closer; these know names and plain types, and the nearest right name.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dagrl.spec.errors import Place, nearest, shown, suggest
from dagrl.spec.number_formats import NUMBER_FORMATS
from dagrl.spec.positions import Findings

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
    for field, value in given.items():
        inner: Place = (*place, field)
        if field not in known:
            findings.error(inner, f"{owner} has no field `{field}`; {_near(field, known, library)}")
        elif known[field] == "torch.dtype":
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


def source_of(package: str, file: str) -> str | None:
    """The text of a file below an installed package, which is not imported; None where there is none."""
    found = importlib.util.find_spec(package)
    for location in (found.submodule_search_locations or ()) if found else ():
        path = Path(location) / file
        if path.is_file():
            return path.read_text(encoding="utf-8")
    return None


def fields_of_class(source: str, class_name: str) -> dict[str, str]:
    """Fields that the class states itself, in `source` -> their type as written there, without ``Optional``.

    Of an annotation with further words for other readers, ``A[type, ...]``, the type is taken, or the values that it
    says can be chosen.
    """
    for statement in ast.parse(source).body:
        if isinstance(statement, ast.ClassDef) and statement.name == class_name:
            return {
                line.target.id: _without_optional(_plain_type(line.annotation))
                for line in statement.body
                if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)
            }
    return {}


def defaults_of_class(source: str, class_name: str) -> dict[str, Any]:
    """Fields that the class states itself, in `source` -> their default, where that is written as a plain value."""
    for statement in ast.parse(source).body:
        if isinstance(statement, ast.ClassDef) and statement.name == class_name:
            return {
                line.target.id: ast.literal_eval(line.value)
                for line in statement.body
                if isinstance(line, ast.AnnAssign)
                and isinstance(line.target, ast.Name)
                and isinstance(line.value, ast.Constant)
            }
    return {}


def _plain_type(annotation: ast.expr) -> str:
    if not isinstance(annotation, ast.Subscript) or ast.unparse(annotation.value) not in ("A", "Annotated"):
        return ast.unparse(annotation)
    assert isinstance(annotation.slice, ast.Tuple)
    wanted, *words = annotation.slice.elts
    choices = [
        keyword.value
        for word in words
        if isinstance(word, ast.Call)
        for keyword in word.keywords
        # Lists that have a name can be longer at run time.
        if keyword.arg == "choices" and isinstance(keyword.value, ast.List | ast.Tuple)
    ]
    if choices:
        return f"Literal[{', '.join(map(ast.unparse, choices[0].elts))}]"
    return ast.unparse(wanted)


def _without_optional(annotation: str) -> str:
    return annotation.removeprefix("Optional[").removesuffix("]") if annotation.startswith("Optional[") else annotation


def _options(annotation: str) -> tuple[Any, ...]:
    """What a ``Literal`` type allows; nothing for another type."""
    if not annotation.startswith("Literal[") or annotation.count("[") > 1:
        return ()
    return ast.literal_eval(f"({annotation.removeprefix('Literal[').removesuffix(']')},)")


def _near(field: str, known: Mapping[str, str], library: str) -> str:
    # All of the hundreds of names would help nobody.
    return suggest(field, known) if nearest(field, known) else f"look the name up in {library}, or take it out"
