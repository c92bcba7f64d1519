"""Expands words of bash: quotes, variables, arrays and arithmetic.

Follows the expansion rules of bash's manual, section 3.5, for what launch scripts use. Programs are never called:
``$(...)`` stands as unknown in a word, as does a variable that neither the script nor the caller sets.
"""

from __future__ import annotations

import fnmatch
import re
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from dagrl.importing.settings import Unresolved
from dagrl.importing.shell import arithmetic
from dagrl.importing.shell.arithmetic import UnknownNumberError, Variables
from dagrl.importing.shell.syntax import Node, line_of, offset_of, source_of, whole_number

_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "a": "\a", "b": "\b", "e": "\x1b"}


@dataclass(frozen=True, slots=True)
class Word:
    """A word of a command, after expansion."""

    text: str
    """With ``$NAME`` or ``$(command)`` for what is unknown."""
    file: str
    line: int
    missing: tuple[str, ...] = ()
    """Unknown variables and commands in it."""

    @property
    def value(self) -> str | Unresolved:
        """The text, or an `Unresolved`."""
        return Unresolved(self.text, self.missing) if self.missing else self.text


@dataclass
class Scope:
    """Variables and positional parameters of a script."""

    file: str
    scalars: dict[str, Word] = field(default_factory=dict)
    arrays: dict[str, dict[str, Word]] = field(default_factory=dict)
    """Elements by index, or by key for associative arrays, in their order."""
    associative: set[str] = field(default_factory=set)
    """Names that ``declare -A`` has made associative arrays."""
    positional: list[Word] = field(default_factory=list)
    fixed: frozenset[str] = frozenset()
    """Variables that the caller sets: the script does not change them."""

    def assign(self, name: str, words: list[Word] | Word, *, append: bool = False) -> None:
        """Set or extend a scalar or an array, unless the caller sets it."""
        if name in self.fixed:
            return
        if isinstance(words, list):
            elements = self._elements(name) if append else {}
            self.scalars.pop(name, None)
            start = _next_index(elements)
            self.arrays[name] = elements | {str(index): word for index, word in enumerate(words, start)}
        elif name in self.arrays:
            self.assign_element(name, "0", words, append=append)
        elif append and (earlier := self.scalars.get(name)):
            text, missing = earlier.text + words.text, earlier.missing + words.missing
            self.scalars[name] = Word(text, words.file, words.line, missing)
        else:
            self.scalars[name] = words

    def assign_element(self, name: str, key: str, word: Word, *, append: bool = False) -> None:
        """Set or extend an element of an array."""
        if name in self.fixed:
            return
        elements = self._elements(name)
        self.scalars.pop(name, None)
        if append and (earlier := elements.get(key)):
            word = Word(earlier.text + word.text, word.file, word.line, earlier.missing + word.missing)
        elements[key] = word
        order = elements if name in self.associative else sorted(elements, key=int)
        self.arrays[name] = {each: elements[each] for each in order}

    def _elements(self, name: str) -> dict[str, Word]:
        """A copy of an array's elements; a scalar is an array of one."""
        if name in self.arrays:
            return dict(self.arrays[name])
        return {"0": self.scalars[name]} if name in self.scalars else {}

    def element(self, name: str, key: str) -> Word | None:
        """An element of an array; None if there is none. Indices below 0 count from the end."""
        elements = self._elements(name)
        if name not in self.associative and int(key) < 0:
            key = str(_next_index(elements) + int(key))
        return elements.get(key)

    def unset(self, name: str) -> None:
        """Forget a variable."""
        self.scalars.pop(name, None)
        self.arrays.pop(name, None)
        self.associative.discard(name)

    def array(self, name: str) -> list[Word]:
        """The elements of an array; a scalar is an array of one."""
        return list(self._elements(name).values())

    def parameter(self, name: str) -> Word | None:
        """The value of a variable or positional parameter; None if it is not set."""
        if (place := whole_number(name)) is not None:
            return self.positional[place - 1] if 0 < place <= len(self.positional) else None
        return self._elements(name).get("0")


def _next_index(elements: dict[str, Word]) -> int:
    """The index after the last one of an array; associative arrays have none."""
    return max((number for key in elements if (number := whole_number(key)) is not None), default=-1) + 1


Substitute = Callable[[list[Node], "Expander"], Word | None]
"""Returns the output of the statements of ``$(...)``; None if it is not known."""


class Builder:
    """Collects parts into words, and splits unquoted expansions at white space."""

    def __init__(self, file: str, line: int) -> None:
        self.file, self.line = file, line
        self.words: list[Word] = []
        self._parts: list[str] | None = None
        self._missing: list[str] = []
        self._home = (file, line)

    def add(self, text: str, missing: tuple[str, ...] = (), home: Word | None = None) -> None:
        """Add a part to the current word; `home` is the array's element that it comes from."""
        if self._parts is None:
            self._parts = []
            self._home = (home.file, home.line) if home else (self.file, self.line)
        self._parts.append(text)
        self._missing += missing

    def split(self, word: Word, home: Word | None = None) -> None:
        """Add an unquoted expansion: white space in it separates words."""
        for index, piece in enumerate(re.split(r"([ \t\n]+)", word.text)):
            if index % 2:
                self.end()
            elif piece:
                self.add(piece, word.missing, home)

    def end(self) -> None:
        """End the current word, if there is one."""
        if self._parts is not None:
            self.words.append(Word("".join(self._parts), *self._home, tuple(dict.fromkeys(self._missing))))
        self._parts, self._missing = None, []

    def finish(self) -> list[Word]:
        """All words."""
        self.end()
        return self.words


class Expander:
    """Expands words of one source."""

    def __init__(
        self,
        scope: Scope,
        source: bytes,
        substitute: Substitute | None = None,
        lines: Sequence[tuple[int, int]] = (),
    ) -> None:
        """`lines` are the offsets in `source` from which on it comes from another line, and these lines."""
        self.scope, self.source = scope, source
        self.substitute = substitute
        self._lines = lines

    def line(self, node: Node) -> int:
        """The line of a node in the file, from 1."""
        if self._lines:
            place = bisect_right(self._lines, offset_of(node), key=lambda start: start[0])
            return self._lines[place - 1][1]
        return line_of(node)

    def words(self, node: Node) -> list[Word]:
        """Expand a word where bash expects several: it may become none, one or more."""
        return self._built(node, quoted=False).finish()

    def single(self, node: Node | None, line: int = 1) -> Word:
        """Expand a word where bash expects one value, as after ``NAME=``."""
        if node is None:
            return Word("", self.scope.file, line)
        words = self._built(node, quoted=True).finish()
        missing = tuple(name for word in words for name in word.missing)
        return Word(" ".join(word.text for word in words), self.scope.file, self.line(node), missing)

    def _built(self, node: Node, *, quoted: bool) -> Builder:
        builder = Builder(self.scope.file, self.line(node))
        for part in node.get("Parts", ()):
            self._part(part, builder, quoted=quoted)
        return builder

    def _part(self, node: Node, builder: Builder, *, quoted: bool, in_string: bool = False) -> None:
        kind = node["Type"]
        if kind == "Lit":
            pattern = r"\\([$`\"\\\n])" if in_string else r"\\(.)"
            text = node["Value"].replace("\\\n", "")
            builder.add(re.sub(pattern, r"\1", text, flags=re.DOTALL))
        elif kind == "SglQuoted":
            value = node.get("Value", "")
            builder.add(_unescaped(value) if node.get("Dollar") is True else value)
        elif kind == "DblQuoted":
            parts = node.get("Parts", ())
            if not parts or not all(_is_list(part) for part in parts):
                builder.add("")  # An empty string is a word, an empty list is none.
            for part in parts:
                self._part(part, builder, quoted=True, in_string=True)
        elif kind == "ParamExp":
            self._parameter(node, builder, quoted=quoted)
        elif kind == "ArithmExp":
            self._arithmetic(node, builder)
        elif kind == "CmdSubst":
            self._substitution(node, builder, quoted=quoted)
        else:
            text = source_of(node, self.source)
            builder.add(text, (text,))

    def _list(self, words: list[Word], builder: Builder, *, quoted: bool, joined: bool) -> None:
        if joined:
            builder.add(" ".join(word.text for word in words), tuple(m for word in words for m in word.missing))
            return
        for index, word in enumerate(words):
            if index:
                builder.end()
            if quoted:
                builder.add(word.text, word.missing, word)
            else:
                builder.split(word, word)

    def _parameter(self, node: Node, builder: Builder, *, quoted: bool) -> None:
        """``$NAME``, ``${NAME}`` and its forms."""
        name = node["Param"]["Value"]
        index = self.subscript(name, node["Index"]) if "Index" in node else None
        slices = _bounds(node["Slice"], self) if node.get("Slice") else slice(None)
        unsupported = any(node.get(key) for key in ("Excl", "Width", "Names")) or ("Index" in node and index is None)
        if unsupported or slices is None:
            self._unknown(node, builder)
        elif name in ("@", "*") or index in ("@", "*"):
            elements = self.scope.positional if name in ("@", "*") else self.scope.array(name)
            if node.get("Slice") and name in ("@", "*"):
                elements = [Word(self.scope.file, self.scope.file, 1), *elements]
            elements = elements[slices]
            if node.get("Length"):
                builder.add(str(len(elements)))
            elif node.get("Exp") or node.get("Repl"):
                self._unknown(node, builder)
            else:
                self._list(elements, builder, quoted=quoted, joined=quoted and "*" in (name, index))
        elif name == "#":
            builder.add(str(len(self.scope.positional)))
        else:
            word = self._element(name, index)
            if node.get("Length"):
                builder.add(*(("?", (f"${name}",)) if word is None else (str(len(word.text)), word.missing)))
            elif node.get("Exp"):
                self._operator(node, name, word, builder, quoted=quoted)
            elif node.get("Repl"):
                self._replace(node, name, word, builder, quoted=quoted)
            elif node.get("Slice") and word is not None:
                if word.missing:
                    self._unknown(node, builder)
                else:
                    self._value(name, Word(word.text[slices], word.file, word.line), builder, quoted=quoted)
            else:
                self._value(name, word, builder, quoted=quoted)

    def _element(self, name: str, index: str | None) -> Word | None:
        if name in ("0", "BASH_SOURCE"):
            return Word(self.scope.file, self.scope.file, 1)
        if index is None:
            return self.scope.parameter(name)
        return self.scope.element(name, index)

    def subscript(self, name: str, node: Node) -> str | None:
        """The index or key in ``NAME[...]``, ``@`` and ``*`` too; None if it is not known."""
        text = source_of(node, self.source)
        if text in ("@", "*"):
            return text
        if name in self.scope.associative:
            # As arithmetic, `[qwen-7b]` is a difference.
            word = self.single(node) if node["Type"] == "Word" else Word(text, "", 0, (text,) if "$" in text else ())
            return None if word.missing else word.text
        try:
            return str(self.number(node))
        except UnknownNumberError:
            return None

    def _value(self, name: str, word: Word | None, builder: Builder, *, quoted: bool) -> None:
        if word is None and name in self.scope.arrays:
            return
        if word is None:
            builder.add(f"${name}", (f"${name}",))
        elif quoted:
            builder.add(word.text, word.missing)
        else:
            builder.split(word)

    def _unknown(self, node: Node, builder: Builder) -> None:
        text = source_of(node, self.source)
        builder.add(text, (text,))

    def _operator(self, node: Node, name: str, word: Word | None, builder: Builder, *, quoted: bool) -> None:
        sign = node["Exp"]["Op"]
        argument = node["Exp"].get("Word")
        is_empty = word is None or (sign.startswith(":") and word.text == "" and not word.missing)
        if sign in (":-", "-", ":=", "="):
            if not is_empty:
                self._value(name, word, builder, quoted=quoted)
                return
            self._argument(argument, builder, quoted=quoted)
            if "=" in sign:
                self.scope.assign(name, self.single(argument, self.line(node)))
        elif sign in (":+", "+"):
            if not is_empty:
                self._argument(argument, builder, quoted=quoted)
        elif sign in (":?", "?"):
            self._value(name, None if is_empty else word, builder, quoted=quoted)
        elif word is None or word.missing:
            builder.add(source_of(node, self.source), (f"${name}",))
        else:
            changed = _changed(word.text, sign, self.single(argument))
            if changed is None:
                self._unknown(node, builder)
            else:
                self._value(name, Word(changed, word.file, word.line), builder, quoted=quoted)

    def _argument(self, word: Node | None, builder: Builder, *, quoted: bool) -> None:
        """The word after ``:-`` and the like. Unquoted, its literal white space separates words too."""
        for part in (word or {}).get("Parts", ()):
            if part["Type"] == "Lit" and not quoted:
                builder.split(Word(re.sub(r"\\(.)", r"\1", part["Value"]), "", 0))
            else:
                self._part(part, builder, quoted=quoted, in_string=quoted)

    def _replace(self, node: Node, name: str, word: Word | None, builder: Builder, *, quoted: bool) -> None:
        """``${NAME/old/new}`` with a plain text to look for."""
        old, new = (self.single(node["Repl"].get(side)) for side in ("Orig", "With"))
        if word is None or word.missing or old.missing or new.missing or re.search(r"[*?\[]", old.text):
            self._unknown(node, builder)
            return
        text = word.text.replace(old.text, new.text, -1 if node["Repl"].get("All") else 1) if old.text else word.text
        self._value(name, Word(text, word.file, word.line), builder, quoted=quoted)

    def _arithmetic(self, node: Node, builder: Builder) -> None:
        try:
            builder.add(str(self.number(node["X"])))
        except UnknownNumberError as unknown:
            builder.add(source_of(node, self.source), (str(unknown),))

    def number(self, node: Node) -> int:
        """The value of an arithmetic expression. UnknownNumberError if it is not known."""

        def text_of(word: Node) -> str:
            expanded = self.single(word)
            if expanded.missing:
                raise UnknownNumberError(expanded.missing[0])
            return expanded.text

        def variable(name: str) -> str:
            word = self.scope.parameter(name)
            if word is None or word.missing:
                raise UnknownNumberError(word.missing[0] if word else f"${name}")
            return word.text

        def assign(name: str, value: int | None) -> None:
            text, missing = (f"${name}", (f"${name}",)) if value is None else (str(value), ())
            self.scope.assign(name, Word(text, self.scope.file, self.line(node), missing))

        return arithmetic.evaluate(node, Variables(text_of, variable, assign))

    def _substitution(self, node: Node, builder: Builder, *, quoted: bool) -> None:
        """``$(...)`` of commands that only print what they are given; the output of others is not known."""
        output = self.substitute(node.get("Stmts") or [], self) if self.substitute else None
        if output is None:
            text = " ".join(source_of(node, self.source).split())
            builder.add(text, (text,))
        elif quoted:
            builder.add(output.text, output.missing)
        else:
            builder.split(output)


def _bounds(node: Node, expander: Expander) -> slice | None:
    """The part that ``:OFFSET:LENGTH`` takes; None if it is not known."""
    try:
        start = expander.number(node["Offset"])
        length = expander.number(node["Length"]) if node.get("Length") else None
    except UnknownNumberError:
        return None
    if length is None or length < 0:  # A negative length is an offset from the end.
        return slice(start, length)
    reaches_end = start < 0 <= start + length
    return slice(start, None if reaches_end else start + length)


def _is_list(node: Node) -> bool:
    """Whether a part of a string is ``$@`` or ``${NAME[@]}``."""
    if node["Type"] != "ParamExp" or node.get("Length"):
        return False
    index = node.get("Index", {}).get("Parts", [{}])
    return node["Param"]["Value"] == "@" or index[0].get("Value") == "@"


def _unescaped(text: str) -> str:
    return re.sub(r"\\(.)", lambda found: _ESCAPES.get(found[1], found[1]), text, flags=re.DOTALL)


def _changed(text: str, sign: str, argument: Word) -> str | None:
    """Remove a part of a value, or change its case; None for forms that are not supported."""
    pattern = argument.text
    if argument.missing:
        return None
    if sign in ("#", "##"):
        ends = range(len(text) + 1) if sign == "#" else range(len(text), -1, -1)
        return next((text[end:] for end in ends if fnmatch.fnmatchcase(text[:end], pattern)), text)
    if sign in ("%", "%%"):
        starts = range(len(text), -1, -1) if sign == "%" else range(len(text) + 1)
        return next((text[:start] for start in starts if fnmatch.fnmatchcase(text[start:], pattern)), text)
    if sign in ("^^", ",,") and not pattern:
        return text.upper() if sign == "^^" else text.lower()
    return None
