"""Config classes of libraries, read from their source as text: importing the libraries would import torch.

The libraries' own checks are later and stricter; these check names and plain types, and suggest the nearest name.
"""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

UNDECLARED = ("rope_theta", "rope_scaling", "head_dim")
"""Fields that models of transformers read although a config class may not declare them: such classes convert the names
of older files to ``rope_parameters``."""


class ConfigClass(NamedTuple):
    """A config class of transformers."""

    name: str
    types: dict[str, str]
    """Fields -> their annotations in transformers."""
    defaults: dict[str, object]
    """Fields -> their defaults that are plain values."""


NO_CLASS = ConfigClass("", {}, {})
"""Placeholder if transformers is not installed, or lacks a class for a model type."""


def source_of(package: str, file: str, environment: Path | None = None) -> str | None:
    """Return the text of a file below an installed package, without importing it; None if it does not exist.

    With an `environment` the package is the one in this virtual environment.
    """
    for folder in folders_of(package, environment):
        path = folder / file
        if path.is_file():
            return path.read_text(encoding="utf-8")
    return None


def folders_of(package: str, environment: Path | None = None) -> list[Path]:
    """Return the folders of an installed package, in this environment or another one; empty if it is not installed."""
    if environment is not None:
        return [site / package for site in environment.glob("lib/python*/site-packages")]
    found = importlib.util.find_spec(package)
    return [Path(folder) for folder in (found.submodule_search_locations or ())] if found else []


class LibraryClass(NamedTuple):
    """A config class of an installed library."""

    package: str
    file: str
    """Below the package's folder."""
    name: str


@cache
def arguments_of_class(kind: LibraryClass, environment: Path | None = None) -> tuple[str, ...] | None:
    """Return the names of the fields that a dataclass and its bases take.

    None if the library is not installed, or if a version of it has moved the class or a base.
    """
    try:
        tree = ast.parse(source_of(kind.package, kind.file, environment) or "")
    except SyntaxError:  # for another version of Python
        return None
    declared = next((each for each in tree.body if isinstance(each, ast.ClassDef) and each.name == kind.name), None)
    if declared is None:
        return None
    names: list[str] = []
    for base in declared.bases:
        inherited = arguments_of_class(_class_named(ast.unparse(base), kind, tree), environment)
        if inherited is None:
            return None
        names += inherited
    for line in declared.body:
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
            written = ast.unparse(line)
            if "ClassVar" not in written and "init=False" not in written:
                names.append(line.target.id)
    return tuple(dict.fromkeys(names))


def _class_named(name: str, reader: LibraryClass, tree: ast.Module) -> LibraryClass:
    """Return the class `name` of a module, defined in it or imported from the package."""
    for line in tree.body:
        imported = {each.asname or each.name: each.name for each in getattr(line, "names", ())}
        if isinstance(line, ast.ImportFrom) and name in imported:
            folders = [reader.package, *Path(reader.file).parent.parts]
            around = folders[: len(folders) - line.level + 1] if line.level else []
            package, *path = [*around, *(line.module or "").split(".")]
            return LibraryClass(package, f"{'/'.join(path)}.py", imported[name])
    return reader._replace(name=name)


def fields_of_class(source: str, class_name: str) -> dict[str, str]:
    """Map the fields that a class declares itself to their annotations, without ``Optional``.

    In an annotation with further words for other readers, ``A[type, ...]``, the type counts, or the values that can be
    chosen.
    """
    return {
        name: re.sub(r"^Optional\[(.*)\]$", r"\1", ast.unparse(line.annotation))
        for name, line in _declarations(source, class_name)
    }


@cache
def auto_classes(mapping: str) -> Mapping[str, str]:
    """Return the class of transformers for each model type of a `mapping`, such as ``MODEL_FOR_CAUSAL_LM``.

    Importing the module with these names imports the code of generation, which takes seconds.
    """
    source = source_of("transformers", "models/auto/modeling_auto.py") or ""
    found = re.search(rf"^{mapping}_MAPPING_NAMES = OrderedDict\((.*?)\n\)", source, re.DOTALL | re.MULTILINE)
    return dict(re.findall(r'\("([\w.-]+)", "(\w+)"\)', found[1])) if found else {}


@cache
def config_class(model_type: str, part: str | None = None) -> ConfigClass:
    """Return the config class that transformers has for a model type, or for a `part` of it such as ``vision``.

    Fields of its part ``text`` count as its own, because older files store them there.
    """
    base = source_of("transformers", "configuration_utils.py")
    # Text models of families with images share a folder with them.
    folders = dict.fromkeys((model_type, model_type.removesuffix("_text")))
    files = (source_of("transformers", f"models/{folder}/configuration_{folder}.py") for folder in folders)
    source = next(filter(None, files), None)
    if base is None or source is None:
        return NO_CLASS
    wanted = f"{model_type}_{part}" if part else model_type
    for statement in ast.parse(source).body:
        lines = statement.body if isinstance(statement, ast.ClassDef) else []
        if any(ast.unparse(line) == f"model_type = {wanted!r}" for line in lines):
            assert isinstance(statement, ast.ClassDef)
            declared = fields_of_class(base, "PreTrainedConfig") | fields_of_class(source, statement.name)
            types = {name: kind for name, kind in declared.items() if not kind.startswith("ClassVar")}
            defaults = {
                name: ast.literal_eval(line.value)
                for name, line in _declarations(source, statement.name)
                if isinstance(line.value, ast.Constant)
            }
            text = config_class(model_type, "text") if "text_config" in types and part is None else NO_CLASS
            types = dict.fromkeys(UNDECLARED, "Any") | text.types | types
            return ConfigClass(statement.name, types, text.defaults | defaults)
    return NO_CLASS


def has_type(annotation: str, value: object) -> bool:
    """Whether a value has the type in an annotation's text. Types other than plain ones and lists accept any value."""
    return any(test(value) for test in _tests(annotation.replace("List[", "list[")))


def words_of_type(annotation: str) -> str:
    """Return the words for a type in a message."""
    parts = (part.strip() for part in annotation.replace("List[", "list[").split("|"))
    return " or ".join(_WORDS.get(part, part) for part in parts)


def is_whole(value: object) -> bool:
    """Whether a value is a whole number; booleans are not."""
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
_PLAIN: dict[str, Callable[[object], bool]] = {
    "int": is_whole,
    "float": lambda value: isinstance(value, float),
    "bool": lambda value: isinstance(value, bool),
    "str": lambda value: isinstance(value, str),
    "dict": lambda value: isinstance(value, Mapping),
}


@cache
def _tests(annotation: str) -> tuple[Callable[[object], bool], ...]:
    """Return a test for each member of a union."""
    try:
        return tuple(_members(ast.parse(annotation, mode="eval").body))
    except SyntaxError:
        return (lambda value: True,)


def _members(node: ast.expr) -> Iterator[Callable[[object], bool]]:
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
