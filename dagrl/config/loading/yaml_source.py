"""YAML with line numbers, read the way people expect it.

PyYAML follows YAML 1.1, where ``1e-6`` is a string, ``010`` is 8, ``1:30`` is 90 and ``no`` is false. Here ``1e-6``,
``3E5`` and ``1_000`` are numbers and ``010`` is 10; booleans are ``true`` and ``false``, dates are text, and a bare
``yes``, ``no``, ``on`` or ``off`` is refused, for readers cannot know which YAML they are in. `load.py` builds on this.
"""

from __future__ import annotations

import os
import re
from collections.abc import Hashable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from dagrl.config.errors import PipelineError, Place, Problem, dotted
from dagrl.config.loading.bounds import MOST_BYTES, Allowance, BoundedLoader, TooLargeError, is_recursive, why_no_file
from dagrl.config.loading.positions import Position

Tree = dict[str, Any]
_STANDARD = "tag:yaml.org,2002:"
_NULL, _BOOL, _INT, _FLOAT = (f"{_STANDARD}{kind}" for kind in ("null", "bool", "int", "float"))
_MERGE = f"{_STANDARD}merge"
_PLAIN = frozenset({_NULL, _BOOL, _INT, _FLOAT, f"{_STANDARD}str"})
_NESTED = frozenset({f"{_STANDARD}map", f"{_STANDARD}seq"})
_AMBIGUOUS = frozenset({"yes", "no", "on", "off"})
_RESOLVERS = (
    (_BOOL, r"true|True|TRUE|false|False|FALSE", "tTfF"),
    (_INT, r"[-+]?[0-9][0-9_]*|0x[0-9a-fA-F]+", "-+0123456789"),
    (_FLOAT, r"[-+]?(\.[0-9]+|[0-9][0-9_]*(\.[0-9]*)?)([eE][-+]?[0-9]+)?", "-+.0123456789"),
    (_FLOAT, r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)", "-+."),
    (_NULL, r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    (_MERGE, r"<<", "<"),
)


class _Loader(BoundedLoader):
    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 (PyYAML's own way)


class _Dumper(yaml.SafeDumper):
    """Keeps PyYAML's resolvers beside ours, so that every scalar that either would misread is quoted."""


for _tag, _pattern, _first in _RESOLVERS:
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(_tag, re.compile(f"^(?:{_pattern})$"), list(_first))
_Loader.add_constructor(_INT, lambda _, node: int(node.value.replace("_", ""), 16 if "x" in node.value else 10))


@dataclass(slots=True)
class Document:
    """A mapping as a file holds it, where each of its keys stands, and what was wrong with it."""

    tree: Tree
    positions: dict[Place, Position]
    problems: list[Problem] = field(default_factory=list)
    broken: set[Place] = field(default_factory=set)
    """Places whose value could not be read, and is None in the tree."""


def read_document(path: Path, allowance: Allowance | None = None) -> Document:
    """Read a YAML file. PipelineError if it contains no mapping or is too large; smaller faults are `problems`.

    The file counts against `allowance`, which all files of a pipeline share.
    """
    allowance = allowance or Allowance()
    text = _text_of(path, allowance)
    try:
        loader = _Loader(text, allowance)
        root = loader.get_single_node()
    except TooLargeError as error:
        raise PipelineError([Problem(str(path), error.line, "file", str(error))]) from error
    except yaml.YAMLError as error:
        raise PipelineError([_syntax_problem(str(path), text, error)]) from error
    if root is None:
        raise _unreadable(path, "is empty; write the pipeline into it, or start from `extends: NAME`")
    if not isinstance(root, yaml.MappingNode):
        kind = "a list" if isinstance(root, yaml.SequenceNode) else "a single value"
        raise _unreadable(path, f"holds {kind}, not a mapping; begin with lines such as `name: my-run`")
    document = Document({}, {(): Position(str(path), 1)})
    document.tree = _Builder(loader, str(path), document).value(root, ()) or {}
    return document


def parse_value(text: str, allowance: Allowance | None = None, level: int = 0) -> Any:
    """The value of an override, by the rules of the file. ValueError where it is not YAML, TooLargeError among them.

    The value counts against `allowance`, and begins `level` levels below the top of the pipeline.
    """
    try:
        loader = _Loader(text, allowance or Allowance(), level)
        node = loader.get_single_node()
    except yaml.YAMLError as error:
        if isinstance(error, yaml.reader.ReaderError):
            message = f"the value holds the character #x{error.character:02x}, which YAML forbids; take it out"
            raise ValueError(message) from error
        if text[:1] in ("{", "["):
            message = (
                "the brackets are not closed; put quotes around the whole override, for the shell parts it at spaces"
            )
            raise ValueError(message) from error
        raise ValueError("the value is not valid YAML; put it in quotes if it is text") from error
    if node is None:
        raise ValueError("there is no value; write `KEY=null` to take the key away")
    document = Document({}, {})
    value = _Builder(loader, "", document).value(node, ())
    if document.problems:
        raise ValueError(document.problems[0].message)
    return value


def dump_document(tree: Tree) -> str:
    """YAML that `read_document` reads back as the same tree."""
    return yaml.dump(tree, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


def _unreadable(path: Path, message: str) -> PipelineError:
    return PipelineError([Problem(str(path), 1, "file", message)])


def _text_of(path: Path, allowance: Allowance) -> str:
    if why := why_no_file(path):
        raise _unreadable(path, why)
    try:
        # Does not wait for a writer if a named pipe has just taken the file's place.
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            content = file.read(allowance.bytes + 1)
    except OSError as error:
        message = f"cannot be read: {error.strerror}; check the path and the file's permissions"
        raise _unreadable(path, message) from error
    allowance.bytes -= len(content)
    if allowance.bytes < 0:
        message = f"is too large: a pipeline and the files that it extends may have {MOST_BYTES // 1024} KiB"
        raise _unreadable(path, f"{message}; move data and long texts into files of their own")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise _unreadable(path, "is not text in UTF-8; save it as UTF-8 YAML") from error


def _syntax_problem(file: str, text: str, error: yaml.YAMLError) -> Problem:
    if isinstance(error, yaml.reader.ReaderError):
        # Of text that is decoded already, PyYAML gives the character's number.
        message = f"holds the character #x{error.character:02x}, which YAML forbids; take it out"
        return Problem(file, text.count("\n", 0, error.position) + 1, "file", message)
    assert isinstance(error, yaml.MarkedYAMLError)
    mark = error.problem_mark or error.context_mark
    line, column = (mark.line + 1, mark.column + 1) if mark else (1, 1)
    what = error.problem or "cannot be understood"
    if "'\\t'" in what:
        message = "a tab stands where YAML wants spaces; indent with spaces"
    elif "expected a single document" in (error.context or ""):
        message = "a second YAML document begins here; keep one document in a file"
    elif error.context_mark and "duplicate anchor" in (error.context or ""):
        message = f"the same anchor (`&name`) stands here and in line {error.context_mark.line + 1}; rename one of them"
    elif what == "mapping values are not allowed here":
        message = "a `key:` stands where no key may; mend the indentation, or quote a text that holds `: `"
    else:
        within = f" ({error.context})" if error.context else ""
        message = f"is not valid YAML: {what}{within}; mend the brackets, quotes or indentation at or above this line"
    return Problem(file, line, f"column {column}", message)


_MOST_DIGITS = 100
"""No setting takes a longer number, and Python and JSON refuse to write numbers of thousands of digits."""
HALF = "holds half of a character (a lone surrogate); write the character itself"


def encodable(text: str) -> bool:
    """Whether a text can be written as UTF-8: half of a pair that UTF-16 writes a character with cannot."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


class _Builder:
    """Turns composed nodes into plain values, noting positions and problems in the document."""

    def __init__(self, loader: _Loader, file: str, document: Document) -> None:
        self._loader = loader
        self._file = file
        self._document = document

    def value(self, node: yaml.Node, place: Place) -> Any:
        """The node's value; None where it cannot be read."""
        if is_recursive(node):
            return self._broken(node, place, "an alias (`*name`) contains itself; write the value out")
        if node.tag not in (_PLAIN if isinstance(node, yaml.ScalarNode) else _NESTED):
            tag = node.tag.removeprefix(_STANDARD)
            return self._broken(node, place, f"cannot be read as `{tag}`; write a plain value without a `!` tag")
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, place)
        if isinstance(node, yaml.SequenceNode):
            return self._sequence(node, place)
        assert isinstance(node, yaml.ScalarNode), f"YAML has no node such as {node!r}"
        return self._scalar(node, place)

    def _mapping(self, node: yaml.MappingNode, place: Place) -> Tree | None:
        self._check_duplicates(node, place)
        try:
            self._loader.flatten_mapping(node)
        except yaml.constructor.ConstructorError:
            message = "`<<` must name another mapping; write `<<: *name`, or write the keys out"
            return self._broken(node, place, message)
        tree: Tree = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                self._problem(key_node, place, "a key is a list or a mapping; write a plain name before the colon")
                continue
            if not encodable(key_node.value):
                self._problem(key_node, place, f"the key {key_node.value!r} {HALF}")
                continue
            inner = (*place, key_node.value)
            self._document.positions[inner] = Position(self._file, key_node.start_mark.line + 1)
            tree[key_node.value] = self.value(value_node, inner)
        return tree

    def _check_duplicates(self, node: yaml.MappingNode, place: Place) -> None:
        first_line: dict[Hashable, int] = {}
        for key_node, _ in node.value:
            if not isinstance(key_node, yaml.ScalarNode) or key_node.tag == _MERGE:
                continue
            line = key_node.start_mark.line + 1
            if key_node.value in first_line:
                message = f"the key stands here and in line {first_line[key_node.value]}; keep one of them"
                self._problem(key_node, (*place, key_node.value), message)
            first_line.setdefault(key_node.value, line)

    def _sequence(self, node: yaml.SequenceNode, place: Place) -> list[Any]:
        items = []
        for index, item in enumerate(node.value):
            self._document.positions[(*place, index)] = Position(self._file, item.start_mark.line + 1)
            items.append(self.value(item, (*place, index)))
        return items

    def _scalar(self, node: yaml.ScalarNode, place: Place) -> Any:
        if node.style is None and node.value.lower() in _AMBIGUOUS:
            meant = "true" if node.value.lower() in ("yes", "on") else "false"
            message = f"a bare `{node.value}` can mean two things; write `{meant}`, or quotes for the word"
            return self._broken(node, place, message)
        if node.tag in (_INT, _FLOAT) and len(node.value) > _MOST_DIGITS:
            message = (
                f"a number of {len(node.value):,} characters is out of range; write a shorter one, or quote a text"
            )
            return self._broken(node, place, message)
        try:
            value = self._loader.construct_object(node)
        except (yaml.constructor.ConstructorError, ValueError, KeyError):  # KeyError: `!!bool` of another word
            tag = node.tag.removeprefix(_STANDARD)
            return self._broken(node, place, f"cannot be read as `{tag}`; write a plain value without a `!` tag")
        if isinstance(value, str) and not encodable(value):
            return self._broken(node, place, HALF)
        return value

    def _broken(self, node: yaml.Node, place: Place, message: str) -> Any:
        self._problem(node, place, message)
        self._document.broken.add(place)
        return None

    def _problem(self, node: yaml.Node, place: Place, message: str) -> None:
        self._document.problems.append(Problem(self._file, node.start_mark.line + 1, dotted(place), message))
