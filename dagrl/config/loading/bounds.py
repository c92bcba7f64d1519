"""How large a pipeline may be. The bounds apply before aliases are expanded and before values are built.

A few hundred bytes of YAML can stand for billions of values: an alias repeats a list of aliases, which repeat lists of
aliases. `BoundedLoader` therefore measures each node as if its aliases were written out.
"""

from __future__ import annotations

import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import yaml

MOST_BYTES = 512 * 1024
MOST_VALUES = 10_000
"""Keys and values, aliases written out; a large pipeline has some hundreds."""
MOST_LEVELS = 50
MOST_FILES = 32
"""Files of one pipeline, and entries of one `extends`."""

_RECURSIVE = "tag:dagrl,2025:recursive"
_KINDS = (
    (stat.S_ISDIR, "is a folder; give the pipeline's YAML file"),
    (stat.S_ISFIFO, "is a pipe; write the pipeline to a regular file"),
    (stat.S_ISSOCK, "is a socket; give the pipeline's YAML file"),
    (stat.S_ISCHR, "is a device; give the pipeline's YAML file"),
    (stat.S_ISBLK, "is a device; give the pipeline's YAML file"),
)


class TooLargeError(ValueError):
    """A pipeline that exceeds a bound. `line` is where it does."""

    def __init__(self, line: int, message: str) -> None:
        super().__init__(message)
        self.line = line


@dataclass
class Allowance:
    """The size that a pipeline may still grow by, over all its files and overrides."""

    bytes: int = MOST_BYTES
    values: int = MOST_VALUES

    def take_values(self, values: int, line: int) -> None:
        """Count `values` against the allowance. TooLargeError if it is used up."""
        self.values -= values
        if self.values < 0:
            raise TooLargeError(line, _TOO_MANY)


_TOO_MANY = (
    f"a pipeline may hold {MOST_VALUES:,} values, aliases (`*name`) written out; shorten the longest list or section"
)


def why_no_file(path: Path) -> str | None:
    """The reason why a path names no regular file, as the rest of a sentence; None if it names one."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return "does not exist; check the path"
    except ValueError:
        return "is no path: it holds a NUL character; take it out"
    except OSError as error:
        return f"cannot be read: {error.strerror}; check the path and the file's permissions"
    return next((message for is_kind, message in _KINDS if is_kind(mode)), None)


def is_recursive(node: yaml.Node) -> bool:
    """Whether `node` replaces an alias that stands within the value that it names."""
    return node.tag == _RECURSIVE


class _Measure(NamedTuple):
    """The size of a node with its aliases written out."""

    values: int
    characters: int
    levels: int


class BoundedLoader(yaml.SafeLoader):
    """Raises TooLargeError instead of composing nodes that exceed the bounds."""

    def __init__(self, text: str, allowance: Allowance, level: int = 0) -> None:
        """The text counts against `allowance`; `level`: levels of the pipeline around it."""
        super().__init__(text)
        self._allowance, self._level = allowance, level
        self._composed = 0
        self._open: list[str | None] = []
        """Anchors of the nodes that are being composed; None for a node without one."""
        self._measures: dict[int, _Measure] = {}

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """A node and all in it. An alias to a node that is not complete becomes one that `is_recursive`."""
        event = self.peek_event()
        line = event.start_mark.line + 1
        self._composed += 1
        if self._composed > self._allowance.values:
            raise TooLargeError(line, _TOO_MANY)
        if isinstance(event, yaml.AliasEvent):
            if event.anchor in self._open:
                return self._recursive()
            return super().compose_node(parent, index)
        if self._level + len(self._open) >= MOST_LEVELS:
            raise TooLargeError(line, _too_deep())
        self._open.append(event.anchor)
        node = super().compose_node(parent, index)
        self._open.pop()
        assert node is not None, "an event that begins no node"
        self._measure(node, line)
        return node

    def _recursive(self) -> yaml.Node:
        alias: Any = self.get_event()
        node = yaml.ScalarNode(_RECURSIVE, alias.anchor, alias.start_mark, alias.end_mark)
        self._measures[id(node)] = _Measure(1, 0, 1)
        return node

    def _measure(self, node: yaml.Node, line: int) -> None:
        inner: list[_Measure] = []
        if isinstance(node, yaml.MappingNode):
            inner = [self._measures[id(each)] for pair in node.value for each in pair]
        elif isinstance(node, yaml.SequenceNode):
            inner = [self._measures[id(each)] for each in node.value]
        own = len(node.value) if isinstance(node, yaml.ScalarNode) else 0
        measure = _Measure(
            1 + sum(each.values for each in inner),
            own + sum(each.characters for each in inner),
            1 + max((each.levels for each in inner), default=0),
        )
        if measure.values > self._allowance.values:
            raise TooLargeError(line, _TOO_MANY)
        if measure.characters > MOST_BYTES:
            message = f"aliases (`*name`) repeat more than {MOST_BYTES // 1024} KiB of text; repeat less of it"
            raise TooLargeError(line, message)
        if self._level + len(self._open) + measure.levels > MOST_LEVELS:
            raise TooLargeError(line, _too_deep())
        self._measures[id(node)] = measure
        if not self._open:
            self._allowance.take_values(measure.values, line)


def _too_deep() -> str:
    return f"is nested more than {MOST_LEVELS} levels deep; close the brackets that were left open"
