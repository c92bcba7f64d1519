"""Config classes of libraries, read from their source as text: importing the libraries would import torch.

The libraries' own checks come later, and look closer; these know names and plain types, and the nearest right name.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from dagrl.config.errors import Place, nearest, shown, suggest
from dagrl.config.loading.positions import Findings
from dagrl.models.number_formats import NUMBER_FORMATS

UNDECLARED = ("rope_theta", "rope_scaling", "head_dim")
"""Fields that models of transformers read though a config class may not declare them: such classes fold the names of
older files into ``rope_parameters``."""


class ConfigClass(NamedTuple):
    """A config class of transformers."""

    name: str
    types: dict[str, str]
    """Fields -> their type as transformers writes it."""
    defaults: dict[str, Any]
    """Fields -> their default, as far as that is a plain value."""


NO_CLASS = ConfigClass("", {}, {})
"""Where transformers is not installed, or has no class for a model type."""


def source_of(package: str, file: str) -> str | None:
    """Return the text of a file below an installed package, which is not imported; None where there is none."""
    found = importlib.util.find_spec(package)
    for location in (found.submodule_search_locations or ()) if found else ():
        path = Path(location) / file
        if path.is_file():
            return path.read_text(encoding="utf-8")
    return None


def fields_of_class(source: str, class_name: str) -> dict[str, str]:
    """Map the fields that a class declares itself to their type as written there, without ``Optional``.

    In an annotation with further words for other readers, ``A[type, ...]``, the type counts, or the values that can be
    chosen.
    """
    fields = {name: _plain_type(line.annotation) for name, line in _declarations(source, class_name)}
    return {
        name: kind.removeprefix("Optional[").removesuffix("]") if kind.startswith("Optional[") else kind
        for name, kind in fields.items()
    }


@cache
def config_class(model_type: str) -> ConfigClass:
    """Return the config class that transformers has for a model type."""
    base = source_of("transformers", "configuration_utils.py")
    source = source_of("transformers", f"models/{model_type}/configuration_{model_type}.py")
    if base is None or source is None:
        return NO_CLASS
    for statement in ast.parse(source).body:
        lines = statement.body if isinstance(statement, ast.ClassDef) else []
        if any(ast.unparse(line) == f"model_type = {model_type!r}" for line in lines):
            assert isinstance(statement, ast.ClassDef)
            declared = fields_of_class(base, "PreTrainedConfig") | fields_of_class(source, statement.name)
            types = {name: kind for name, kind in declared.items() if not kind.startswith("ClassVar")}
            defaults = {
                name: ast.literal_eval(line.value)
                for name, line in _declarations(source, statement.name)
                if isinstance(line.value, ast.Constant)
            }
            return ConfigClass(statement.name, dict.fromkeys(UNDECLARED, "Any") | types, defaults)
    return NO_CLASS


def check_fields(
    place: Place, given: Mapping[str, Any], known: Mapping[str, str], owner: str, library: str, findings: Findings
) -> None:
    """Report names that are not `known`, and values of another type than the class `owner` of `library` says."""
    check_names(place, given, known, owner, library, findings)
    for field, value in given.items():
        kind, message = known.get(field), None
        if kind == "torch.dtype":
            if not isinstance(value, str) or value not in NUMBER_FORMATS:
                message = f"{shown(value)} is no number format; {suggest(str(value), NUMBER_FORMATS)}"
        elif kind is not None and "Callable" in kind:
            message = "takes a function, which a pipeline file cannot hold; take it out"
        elif kind is not None and kind.startswith("Literal["):
            if not has_type(kind, value):
                options = ast.literal_eval(kind.removeprefix("Literal"))
                message = f"{shown(value)} is not known here; {suggest(str(value), map(str, options))}"
        elif kind is not None and not has_type(kind, value, whole_floats=True):
            words = words_of_type(kind.replace("float", "a number"))
            message = f"expected {words}, got {shown(value)}; write {words}"
        if message:
            findings.error((*place, field), message)


def check_names(
    place: Place, given: Iterable[str], known: Mapping[str, str], owner: str, library: str, findings: Findings
) -> None:
    """Report names that are not fields of the class `owner` of `library`."""
    for field in given:
        if field not in known:
            # A list of the hundreds of names would not help.
            near = suggest(field, known) if nearest(field, known) else f"look the name up in {library}, or take it out"
            findings.error((*place, field), f"{owner} has no field `{field}`; {near}")


def has_type(annotation: str, value: Any, *, whole_floats: bool = False) -> bool:
    """Whether a value has a type that is written as text. Types beyond plain ones and lists hold any value."""
    if any(test(value) for test in _tests(annotation.replace("List[", "list["))):
        return True
    return whole_floats and is_whole(value) and has_type(annotation, float(value))


def words_of_type(annotation: str) -> str:
    """Return the words for a type in a message."""
    parts = (part.strip() for part in annotation.replace("List[", "list[").split("|"))
    return " or ".join(_WORDS.get(part, part) for part in parts)


def is_whole(value: Any) -> bool:
    """Whether a value is a whole number, which true and false are not."""
    return isinstance(value, int) and not isinstance(value, bool)


_WORDS = {
    "int": "a whole number",
    "float": "a number with a decimal point",
    "bool": "true or false",
    "str": "text",
    "None": "null",
    "list[int]": "a list of whole numbers",
    "list[str]": "a list of names",
}
_PLAIN: dict[str, Callable[[Any], bool]] = {
    "int": is_whole,
    "float": lambda value: isinstance(value, float),
    "bool": lambda value: isinstance(value, bool),
    "str": lambda value: isinstance(value, str),
    "dict": lambda value: isinstance(value, Mapping),
}


@cache
def _tests(annotation: str) -> tuple[Callable[[Any], bool], ...]:
    """Return a test for each member of a union."""
    try:
        return tuple(_members(ast.parse(annotation, mode="eval").body))
    except SyntaxError:
        return (lambda value: True,)


def _members(node: ast.expr) -> Iterator[Callable[[Any], bool]]:
    match node:
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            yield from _members(left)
            yield from _members(right)
        case ast.Subscript(value=ast.Name(id="Union" | "Optional" as name), slice=inner):
            for member in inner.elts if isinstance(inner, ast.Tuple) else [inner]:
                yield from _members(member)
            if name == "Optional":
                yield lambda value: value is None
        case ast.Subscript(value=ast.Name(id="Literal"), slice=inner):
            options = ast.literal_eval(inner)
            yield lambda value: value in (options if isinstance(options, tuple) else (options,))
        case ast.Subscript(value=ast.Name(id="list"), slice=inner):
            tests = tuple(_members(inner))
            yield lambda value: isinstance(value, list) and all(any(test(each) for test in tests) for each in value)
        case ast.Subscript(value=ast.Name(id="dict")):
            yield _PLAIN["dict"]
        case ast.Constant(value=None):
            yield lambda value: value is None
        case ast.Name(id=name) if name in _PLAIN:
            yield _PLAIN[name]
        case _:
            yield lambda value: True


def _declarations(source: str, class_name: str) -> Iterator[tuple[str, ast.AnnAssign]]:
    for statement in ast.parse(source).body:
        if isinstance(statement, ast.ClassDef) and statement.name == class_name:
            for line in statement.body:
                if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
                    yield line.target.id, line


def _plain_type(annotation: ast.expr) -> str:
    if not isinstance(annotation, ast.Subscript) or ast.unparse(annotation.value) not in ("A", "Annotated"):
        return ast.unparse(annotation)
    assert isinstance(annotation.slice, ast.Tuple)
    wanted, *words = annotation.slice.elts
    for word in words:
        for keyword in word.keywords if isinstance(word, ast.Call) else ():
            # Lists that have a name can be longer at run time.
            if keyword.arg == "choices" and isinstance(keyword.value, ast.List | ast.Tuple):
                return f"Literal[{', '.join(map(ast.unparse, keyword.value.elts))}]"
    return ast.unparse(wanted)
