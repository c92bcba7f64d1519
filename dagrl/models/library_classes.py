"""Config classes of libraries, read from their source as text: importing the libraries would import torch."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path
from typing import Any


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
