"""Reads YAML with the line of each key, within bounds that hostile files cannot exceed.

PyYAML follows YAML 1.1, where ``1e-6`` is a string, ``010`` is 8, ``1:30`` is 90 and ``no`` is false. Here ``1e-6``,
``3E5`` and ``1_000`` are numbers and ``010`` is 10; booleans are ``true`` and ``false``, dates are text, and a bare
``yes``, ``no``, ``on`` or ``off`` is refused because its meaning depends on the version of YAML.

PyYAML composes nodes with positions, and `_Builder` makes plain values of them. (ruamel.yaml knows these scalars, but
takes twice as long to import and to compose.) `_Builder` counts values with aliases expanded, as a few hundred bytes of
YAML can stand for billions of values.
"""

from __future__ import annotations

import re
import stat
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from dagrl.config.errors import PipelineError, Place, Problem, dotted
from dagrl.config.loading.positions import Position

MOST_BYTES = 512 * 1024
MOST_VALUES = 10_000
"""Keys and values; a large pipeline has some hundreds."""
MOST_LEVELS = 50
MOST_FILES = 32
"""Files of one pipeline, and entries of one `extends`."""
_MOST_DIGITS = 100
"""Longest number, in characters. Python and JSON refuse to write numbers with thousands of digits."""

Tree = dict[str, Any]
_Entries = dict[str | int, tuple[yaml.Node, yaml.Node]]
"""Key or index -> the node with its position, and the value's node."""
_STANDARD = "tag:yaml.org,2002:"
_AMBIGUOUS = {
    spelling: meant
    for word, meant in (("yes", "true"), ("on", "true"), ("no", "false"), ("off", "false"))
    for spelling in (word, word.capitalize(), word.upper())
}
"""Words that YAML 1.1 reads as booleans -> replacements. The dumper quotes these words."""
_RESOLVERS = (
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", r"[-+]?[0-9][0-9_]*|0x[0-9a-fA-F]+", "-+0123456789"),
    ("float", r"[-+]?(\.[0-9]+|[0-9][0-9_]*(\.[0-9]*)?)([eE][-+]?[0-9]+)?", "-+.0123456789"),
    ("float", r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)", "-+."),
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("merge", r"<<", "<"),
)
HALF = "contains half of a surrogate pair; write the character itself"


class TooLargeError(ValueError):
    """A pipeline exceeds a bound at `line`."""

    def __init__(self, line: int, message: str) -> None:
        super().__init__(message)
        self.line = line


@dataclass
class Allowance:
    """The remaining size of a pipeline, over all its files and overrides."""

    bytes: int = MOST_BYTES
    values: int = 2 * MOST_VALUES
    """Each value counts twice: when it is composed, and when it is built, with aliases expanded."""
    characters: int = MOST_BYTES

    def take(self, line: int, level: int, values: int = 1, characters: int = 0) -> None:
        """Count values and their characters. TooLargeError if the allowance is used up, or `level` is too deep."""
        self.values -= values
        self.characters -= characters
        if level > MOST_LEVELS:
            message = f"is nested more than {MOST_LEVELS} levels deep, or an alias (`*name`) contains itself"
            raise TooLargeError(line, f"{message}; close all open brackets, and write such a value out")
        if self.values < 0:
            message = f"a pipeline may hold {MOST_VALUES:,} values with aliases (`*name`) expanded"
            raise TooLargeError(line, f"{message}; shorten the longest list or section")
        if self.characters < 0:
            message = f"aliases (`*name`) repeat more than {MOST_BYTES // 1024} KiB of text; repeat less"
            raise TooLargeError(line, message)


@dataclass(slots=True)
class Document:
    """The mapping in a file, the position of each key, and its problems."""

    tree: Tree
    positions: dict[Place, Position]
    problems: list[Problem] = field(default_factory=list)
    broken: set[Place] = field(default_factory=set)
    """Places whose value could not be read, and is None in the tree."""


class _Loader(yaml.BaseLoader):
    """PyYAML's composer; it stops before nodes exceed the allowance."""

    def __init__(self, text: str, allowance: Allowance, level: int) -> None:
        super().__init__(text)
        self._allowance, self._level = allowance, level

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        self._level += 1
        self._allowance.take(self.peek_event().start_mark.line + 1, self._level)
        node = super().compose_node(parent, index)
        self._level -= 1
        return node


class _Dumper(yaml.SafeDumper):
    """Keeps PyYAML's resolvers beside ours, so that it quotes every text that either dialect would misread."""


for _kind, _pattern, _first in _RESOLVERS:
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(_STANDARD + _kind, re.compile(f"^(?:{_pattern})$"), list(_first))


def read_document(path: Path, allowance: Allowance | None = None) -> Document:
    """Read a YAML file. PipelineError if it contains no mapping or is too large; smaller faults are `problems`.

    The file counts against `allowance`, which all files of a pipeline share.
    """
    allowance = allowance or Allowance()
    text = _text_of(path, allowance)
    document = Document({}, {(): Position(str(path), 1)})
    try:
        root = _Loader(text, allowance, 0).get_single_node()
        if root is None:
            raise _unreadable(path, "is empty; write the pipeline into it, or start from `extends: NAME`")
        if not isinstance(root, yaml.MappingNode):
            kind = "a list" if isinstance(root, yaml.SequenceNode) else "a single value"
            raise _unreadable(path, f"holds {kind}, not a mapping; begin with lines such as `name: my-run`")
        document.tree = _Builder(str(path), document, allowance).value(root, (), 1) or {}
    except TooLargeError as error:
        raise PipelineError([Problem(str(path), error.line, "file", str(error), "too-large")]) from error
    except yaml.YAMLError as error:
        raise PipelineError([_syntax_problem(str(path), text, error)]) from error
    return document


def parse_value(text: str, allowance: Allowance | None = None, level: int = 0) -> Any:
    """The value of an override, in the dialect of the file. ValueError if it is not YAML, TooLargeError among them.

    The value counts against `allowance`, and begins `level` levels below the top of the pipeline.
    """
    allowance = allowance or Allowance()
    try:
        node = _Loader(text, allowance, level).get_single_node()
    except yaml.reader.ReaderError as error:
        raise ValueError(f"the value contains the character #x{error.character:02x}; remove it") from error
    except yaml.YAMLError as error:
        unclosed = "the brackets are not closed; quote the whole override, because the shell splits it at spaces"
        invalid = "the value is not valid YAML; put it in quotes if it is text"
        raise ValueError(unclosed if text[:1] in ("{", "[") else invalid) from error
    if node is None:
        raise ValueError("there is no value; write `KEY=null` to remove the key")
    document = Document({}, {})
    value = _Builder("", document, allowance).value(node, (), level + 1)
    if document.problems:
        raise ValueError(document.problems[0].message)
    return value


def dump_document(tree: Tree) -> str:
    """YAML that `read_document` reads back as the same tree."""
    return yaml.dump(tree, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


def why_no_file(path: Path) -> str | None:
    """The reason why a path is not a readable file, as the rest of a sentence; None if it is one."""
    try:
        mode = path.stat().st_mode
        if stat.S_ISREG(mode):
            path.open("rb").close()
            return None
    except FileNotFoundError:
        return "does not exist; check the path"
    except (OSError, ValueError) as error:  # ValueError: a NUL character.
        return f"cannot be read: {getattr(error, 'strerror', error)}; check the path and the file's permissions"
    return f"is {'a folder' if stat.S_ISDIR(mode) else 'no regular file'}; give the pipeline's YAML file"


def encodable(text: str) -> bool:
    """Whether a text can be written as UTF-8, which has no halves of surrogate pairs."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _unreadable(path: Path, message: str) -> PipelineError:
    return PipelineError([Problem(str(path), 1, "file", message, "unreadable-file")])


def _text_of(path: Path, allowance: Allowance) -> str:
    if why := why_no_file(path):
        raise _unreadable(path, why)
    with path.open("rb") as file:
        content = file.read(allowance.bytes + 1)
    allowance.bytes -= len(content)
    if allowance.bytes < 0:
        message = f"is too large: a pipeline and the files that it extends may have {MOST_BYTES // 1024} KiB"
        raise _unreadable(path, f"{message}; move data and long texts to other files")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise _unreadable(path, "is not text in UTF-8; save it as UTF-8 YAML") from error


def _syntax_problem(file: str, text: str, error: yaml.YAMLError) -> Problem:
    if isinstance(error, yaml.reader.ReaderError):
        # `position` counts characters, as the text is decoded already.
        message = f"contains the character #x{error.character:02x}, which YAML forbids; remove it"
        return Problem(file, text.count("\n", 0, error.position) + 1, "file", message, "yaml-syntax")
    assert isinstance(error, yaml.MarkedYAMLError)
    mark = error.problem_mark or error.context_mark
    line, column = (mark.line + 1, mark.column + 1) if mark else (1, 1)
    what = error.problem or "cannot be understood"
    if "'\\t'" in what:
        message = "is indented with a tab; indent with spaces"
    elif what == "mapping values are not allowed here":
        message = "has a `key:` where YAML allows none; fix the indentation, or quote a text that contains `: `"
    else:
        within = f" ({error.context})" if error.context else ""
        message = f"is not valid YAML: {what}{within}; fix the brackets, quotes or indentation at or above this line"
    return Problem(file, line, f"column {column}", message, "yaml-syntax")


class _Builder:
    """Turns composed nodes into plain values, and notes positions and problems in the document."""

    def __init__(self, file: str, document: Document, allowance: Allowance) -> None:
        self._file, self._document, self._allowance = file, document, allowance

    def value(self, node: yaml.Node, place: Place, level: int) -> Any:
        """The node's value; None where it cannot be read."""
        characters = len(node.value) if isinstance(node, yaml.ScalarNode) else 0
        self._allowance.take(node.start_mark.line + 1, level, characters=characters)
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node, place)
        if node.tag not in (f"{_STANDARD}map", f"{_STANDARD}seq"):
            return self._wrong_tag(node, place)
        if isinstance(node, yaml.MappingNode):
            inner = self._entries(node, place, level)
        else:
            inner = {index: (item, item) for index, item in enumerate(node.value)}
        built = {}
        for key, (named, item) in inner.items():
            self._document.positions[(*place, key)] = Position(self._file, named.start_mark.line + 1)
            built[key] = self.value(item, (*place, key), level + 1)
        return built if isinstance(node, yaml.MappingNode) else list(built.values())

    def _entries(self, node: yaml.MappingNode, place: Place | None, level: int) -> _Entries:
        """Keys and values, with those that `<<` merges.

        `place` is None for a merged mapping, whose problems are reported where it is written.
        """
        own: _Entries = {}
        merged: _Entries = {}
        for key, value in node.value:
            line = key.start_mark.line + 1
            self._allowance.take(line, level)
            if key.tag == f"{_STANDARD}merge":
                for source in value.value if isinstance(value, yaml.SequenceNode) else [value]:
                    if isinstance(source, yaml.MappingNode):
                        merged = self._entries(source, None, level + 1) | merged
                    elif place is not None:
                        self._broken(node, place, "`<<` must name mappings; write `<<: *name`, or write out the keys")
            elif not isinstance(key, yaml.ScalarNode):
                self._problem(line, place, "a key is a list or a mapping; write a plain name before the colon")
            elif not encodable(key.value):
                self._problem(line, place, f"the key {key.value!r} {HALF}")
            elif key.value in own:
                first = own[key.value][0].start_mark.line + 1
                message = f"the key is repeated, first in line {first}; keep one of them"
                self._problem(line, (*(place or ()), key.value), message, "duplicate-key")
            else:
                own[key.value] = (key, value)
        return merged | own

    def _scalar(self, node: yaml.ScalarNode, place: Place) -> bool | int | float | str | None:
        text, kind = node.value, node.tag.removeprefix(_STANDARD)
        if node.style is None and (meant := _AMBIGUOUS.get(text)):
            return self._broken(node, place, f"a bare `{text}` is ambiguous; write `{meant}`, or quote the word")
        if not encodable(text):
            return self._broken(node, place, HALF)
        if kind in ("int", "float") and len(text) > _MOST_DIGITS:
            message = f"a number of {len(text):,} characters is out of range; write a shorter one, or quote a text"
            return self._broken(node, place, message)
        with suppress(ValueError, KeyError):
            match kind:
                case "str":
                    return text
                case "null":
                    return None
                case "bool":
                    return {"true": True, "false": False}[text.lower()]
                case "int":
                    return int(text.replace("_", ""), 16 if "x" in text else 10)
                case "float":
                    return float(text.replace("_", "").lower().replace(".inf", "inf").replace(".nan", "nan"))
        return self._wrong_tag(node, place)

    def _wrong_tag(self, node: yaml.Node, place: Place) -> Any:
        tag = node.tag.removeprefix(_STANDARD)
        return self._broken(node, place, f"cannot be read as `{tag}`; write a plain value without a `!` tag")

    def _broken(self, node: yaml.Node, place: Place, message: str) -> Any:
        self._problem(node.start_mark.line + 1, place, message, "unreadable-value")
        self._document.broken.add(place)

    def _problem(self, line: int, place: Place | None, message: str, code: str = "unreadable-key") -> None:
        if place is not None:
            self._document.problems.append(Problem(self._file, line, dotted(place), message, code))
