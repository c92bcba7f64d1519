"""Expands words of bash, from the syntax tree of tree-sitter-bash: quotes, variables, arrays and arithmetic.

Follows the expansion rules of bash's manual, section 3.5, for what launch scripts use. Programs are never called:
``$(...)`` stands as unknown in a word, as does a variable that neither the script nor the caller sets.
"""

from __future__ import annotations

import fnmatch
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from dagrl.importing.settings import Unresolved
from dagrl.importing.shell.arithmetic import Arithmetic, UnknownNumberError

if TYPE_CHECKING:
    from tree_sitter import Node

_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\", "'": "'", '"': '"', "a": "\a", "b": "\b", "e": "\x1b"}
_PUNCTUATION = frozenset({'"', "$", "${", "}", "$(", ")", "`", "!"})


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
    """Variables, functions and positional parameters of a script."""

    file: str
    scalars: dict[str, Word] = field(default_factory=dict)
    arrays: dict[str, list[Word]] = field(default_factory=dict)
    positional: list[Word] = field(default_factory=list)

    def assign(self, name: str, words: list[Word] | Word, *, append: bool = False) -> None:
        """Set or extend a scalar or an array."""
        if isinstance(words, list):
            before = self.array(name) if append else []
            self.scalars.pop(name, None)
            self.arrays[name] = [*before, *words]
        elif append and name in self.arrays:
            self.arrays[name] = [*self.arrays[name], words]
        elif append and (earlier := self.scalars.get(name)):
            self.scalars[name] = Word(
                earlier.text + words.text, words.file, words.line, earlier.missing + words.missing
            )
        else:
            self.arrays.pop(name, None)
            self.scalars[name] = words

    def unset(self, name: str) -> None:
        """Forget a variable."""
        self.scalars.pop(name, None)
        self.arrays.pop(name, None)

    def array(self, name: str) -> list[Word]:
        """The elements of an array; a scalar is an array of one."""
        if name in self.arrays:
            return self.arrays[name]
        return [self.scalars[name]] if name in self.scalars else []

    def scalar(self, name: str) -> Word | None:
        """The value of a variable; None if it is not set."""
        if name in self.arrays:
            return self.arrays[name][0] if self.arrays[name] else None
        return self.scalars.get(name)


class Builder:
    """Collects parts into words, and splits unquoted expansions at white space."""

    def __init__(self, file: str, line: int) -> None:
        self.file, self.line = file, line
        self.words: list[Word] = []
        self._parts: list[str] | None = None
        self._missing: list[str] = []
        self._line: int | None = None

    def add(self, text: str, missing: tuple[str, ...] = (), *, line: int | None = None, file: str | None = None) -> None:
        """Add a part to the current word."""
        if self._parts is None:
            self._parts = []
            self._line = line
        del file
        self._parts.append(text)
        self._missing += missing

    def split(self, word: Word) -> None:
        """Add an unquoted expansion: white space in it separates words."""
        pieces = re.split(r"([ \t\n]+)", word.text)
        for index, piece in enumerate(pieces):
            if index % 2:
                self.end()
            elif piece:
                self.add(piece, word.missing)

    def end(self) -> None:
        """End the current word, if there is one."""
        if self._parts is not None:
            line = self.line if self._line is None else self._line
            self.words.append(Word("".join(self._parts), self.file, line, tuple(dict.fromkeys(self._missing))))
        self._parts, self._missing, self._line = None, [], None

    def finish(self) -> list[Word]:
        """All words."""
        self.end()
        return self.words


class Expander:
    """Expands nodes of one script's syntax tree."""

    def __init__(self, scope: Scope, source: bytes, base_line: int = 0) -> None:
        self.scope, self.source, self.base_line = scope, source, base_line

    def line(self, node: Node) -> int:
        """The line of a node in the file, from 1."""
        return node.start_point[0] + 1 + self.base_line

    def text(self, node: Node) -> str:
        """The source of a node."""
        return self.source[node.start_byte : node.end_byte].decode(errors="replace")

    def words(self, node: Node) -> list[Word]:
        """Expand a node where bash expects words: it may become none, one or several."""
        builder = Builder(self.scope.file, self.line(node))
        self._expand(node, builder, quoted=False)
        return builder.finish()

    def single(self, node: Node | None, *, at: int = 1) -> Word:
        """Expand a node where bash expects one value, as after ``NAME=``."""
        if node is None:
            return Word("", self.scope.file, at)
        builder = Builder(self.scope.file, self.line(node))
        self._expand(node, builder, quoted=True)
        words = builder.finish()
        missing = tuple(name for word in words for name in word.missing)
        return Word(" ".join(word.text for word in words), self.scope.file, self.line(node), missing)

    def _expand(self, node: Node, builder: Builder, *, quoted: bool) -> None:
        kind = node.type
        if kind in ("word", "number", "variable_name", "special_variable_name", "regex", "extglob_pattern"):
            if node.named_child_count and kind in ("word", "number"):
                self._children(node, builder, quoted=quoted)
            else:
                self._literal(self.text(node), builder)
        elif kind == "string":
            builder.add("")
            self._string(node, builder)
        elif kind == "raw_string":
            builder.add(self.text(node)[1:-1])
        elif kind == "ansi_c_string":
            builder.add(re.sub(r"\\(.)", lambda found: _ESCAPES.get(found[1], found[0]), self.text(node)[2:-1]))
        elif kind == "translated_string":
            self._children(node, builder, quoted=True)
        elif kind == "simple_expansion":
            self._variable(self.text(node)[1:], node, builder, quoted=quoted)
        elif kind == "expansion":
            self._parameter(node, builder, quoted=quoted)
        elif kind == "arithmetic_expansion":
            self._arithmetic(node, builder)
        elif kind in ("command_substitution", "process_substitution"):
            self._substitution(node, builder, quoted=quoted)
        elif kind in ("concatenation", "command_name", "array"):
            self._children(node, builder, quoted=quoted)
        elif kind == "brace_expression":
            builder.add(self.text(node), (self.text(node),))
        else:
            builder.add(self.text(node))

    def _children(self, node: Node, builder: Builder, *, quoted: bool) -> None:
        position = node.start_byte
        for child in node.children:
            gap = self.source[position : child.start_byte].decode(errors="replace")
            if gap and node.type != "command_name":
                self._literal(gap, builder)
            self._expand(child, builder, quoted=quoted)
            position = child.end_byte

    def _literal(self, text: str, builder: Builder) -> None:
        text = text.replace("\\\n", "")
        builder.add(re.sub(r"\\(.)", r"\1", text, flags=re.DOTALL))

    def _string(self, node: Node, builder: Builder) -> None:
        position = node.start_byte + 1
        for child in node.children:
            if child.type == '"':
                continue
            if child.start_byte > position:
                builder.add(self._unescaped(self.source[position : child.start_byte].decode(errors="replace")))
            if child.type == "string_content":
                builder.add(self._unescaped(self.text(child)))
            elif child.type == "$":
                builder.add("$")
            else:
                self._expand(child, builder, quoted=True)
            position = child.end_byte
        if position < node.end_byte - 1:
            builder.add(self._unescaped(self.source[position : node.end_byte - 1].decode(errors="replace")))

    @staticmethod
    def _unescaped(text: str) -> str:
        return re.sub(r'\\([$`"\\\n])', lambda found: "" if found[1] == "\n" else found[1], text)

    def _variable(self, name: str, node: Node, builder: Builder, *, quoted: bool) -> None:
        if name in ("@", "*"):
            self._list(self.scope.positional, builder, quoted=quoted, joined=quoted and name == "*")
            return
        if name.isdigit():
            word = self.scope.positional[int(name) - 1] if 0 < int(name) <= len(self.scope.positional) else None
            if name == "0":
                word = Word(self.scope.file, self.scope.file, self.line(node))
        elif name == "#":
            word = Word(str(len(self.scope.positional)), self.scope.file, self.line(node))
        else:
            word = self.scope.scalar(name)
        self._value(name, word, builder, quoted=quoted)

    def _value(self, name: str, word: Word | None, builder: Builder, *, quoted: bool) -> None:
        if word is None and name in self.scope.arrays:
            return
        if word is None:
            builder.add(f"${name}", (f"${name}",))
        elif quoted:
            builder.add(word.text, word.missing)
        else:
            builder.split(word)

    def _list(self, words: list[Word], builder: Builder, *, quoted: bool, joined: bool) -> None:
        if joined:
            builder.add(" ".join(word.text for word in words), tuple(m for word in words for m in word.missing))
            return
        for index, word in enumerate(words):
            if index:
                builder.end()
            if quoted:
                builder.add(word.text, word.missing, line=word.line, file=word.file)
            else:
                before = len(builder.words)
                builder.split(word)
                builder.end()
                builder.words[before:] = [
                    Word(each.text, word.file, word.line, each.missing) for each in builder.words[before:]
                ]

    def _parameter(self, node: Node, builder: Builder, *, quoted: bool) -> None:
        """``${NAME}`` and its forms."""
        text = self.text(node)[2:-1]
        found = re.match(r"(#|!)?(\w+|[@*#])(\[[^\]]*\])?", text)
        if not found or found[1] == "!":
            builder.add(self.text(node), (self.text(node),))
            return
        length, name, index = found[1] == "#", found[2], found[3]
        rest = text[found.end() :]
        if index in ("[@]", "[*]") or name in ("@", "*"):
            elements = self.scope.positional if name in ("@", "*") else self.scope.array(name)
            if length:
                builder.add(str(len(elements)))
            elif rest:
                builder.add(self.text(node), (self.text(node),))
            else:
                self._list(elements, builder, quoted=quoted, joined=quoted and "*" in (index or name))
            return
        word = self._element(name, index)
        if length:
            builder.add("?" if word is None else str(len(word.text)), (f"${name}",) if word is None else ())
            return
        if not rest:
            self._value(name, word, builder, quoted=quoted)
            return
        self._operator(node, name, word, rest, builder, quoted=quoted)

    def _element(self, name: str, index: str | None) -> Word | None:
        if name.isdigit():
            place = int(name)
            return self.scope.positional[place - 1] if 0 < place <= len(self.scope.positional) else None
        if index is None:
            return self.scope.scalar(name)
        elements = self.scope.array(name)
        if name == "BASH_SOURCE" and not elements:
            return Word(self.scope.file, self.scope.file, 1)
        number = index[1:-1]
        inside = re.fullmatch(r"-?\d+", number)
        return elements[int(number)] if inside and -len(elements) <= int(number) < len(elements) else None

    def _operator(
        self, node: Node, name: str, word: Word | None, rest: str, builder: Builder, *, quoted: bool
    ) -> None:
        operator = re.match(r":?[-=+?]|##?|%%?|//?|\^\^?|,,?|:", rest)
        assert operator is not None or rest
        sign = operator[0] if operator else ""
        is_empty = word is None or (sign.startswith(":") and word.text == "" and not word.missing)
        if sign in (":-", "-", ":=", "="):
            if is_empty:
                self._argument(node, sign, builder, quoted=quoted)
                if "=" in sign:
                    self.scope.assign(name, self._argument_word(node, sign))
            else:
                self._value(name, word, builder, quoted=quoted)
        elif sign in (":+", "+"):
            if not is_empty:
                self._argument(node, sign, builder, quoted=quoted)
        elif sign in (":?", "?"):
            self._value(name, None if is_empty else word, builder, quoted=quoted)
        elif word is None or word.missing:
            builder.add(self.text(node), (f"${name}",))
        else:
            changed = self._changed(word.text, sign, self._argument_word(node, sign))
            if changed is None:
                builder.add(self.text(node), (self.text(node),))
            else:
                self._value(name, Word(changed, word.file, word.line), builder, quoted=quoted)

    def _argument_nodes(self, node: Node, sign: str) -> tuple[int, list[Node]]:
        """Where the argument of an operator begins, and its nodes."""
        for index, child in enumerate(node.children):
            if child.type == sign and index > 0:
                return child.end_byte, [each for each in node.children[index + 1 :] if each.type != "}"]
        return node.end_byte - 1, []

    def _argument(self, node: Node, sign: str, builder: Builder, *, quoted: bool) -> None:
        position, nodes = self._argument_nodes(node, sign)
        for each in nodes:
            if each.start_byte > position:
                gap = Word(self.source[position : each.start_byte].decode(errors="replace"), "", 0)
                if quoted:
                    builder.add(gap.text)
                else:
                    builder.split(gap)
            if quoted or each.type != "word":
                self._expand(each, builder, quoted=quoted)
            else:
                builder.split(Word(re.sub(r"\\(.)", r"\1", self.text(each)), "", 0))
            position = each.end_byte

    def _argument_word(self, node: Node, sign: str) -> Word:
        builder = Builder(self.scope.file, self.line(node))
        builder.add("")
        self._argument(node, sign, builder, quoted=True)
        return builder.finish()[0]

    @staticmethod
    def _changed(text: str, sign: str, argument: Word) -> str | None:
        """Remove or replace a part of a value; None for forms that are not supported."""
        if argument.missing:
            return None
        pattern = argument.text
        if sign in ("#", "##"):
            ends = range(len(text) + 1) if sign == "#" else range(len(text), -1, -1)
            return next((text[end:] for end in ends if fnmatch.fnmatchcase(text[:end], pattern)), text)
        if sign in ("%", "%%"):
            starts = range(len(text), -1, -1) if sign == "%" else range(len(text) + 1)
            return next((text[:start] for start in starts if fnmatch.fnmatchcase(text[start:], pattern)), text)
        if sign in ("^^", ",,") and not pattern:
            return text.upper() if sign == "^^" else text.lower()
        return None

    def _arithmetic(self, node: Node, builder: Builder) -> None:
        try:
            builder.add(str(Arithmetic(self).value(node)))
        except UnknownNumberError as unknown:
            builder.add(self.text(node), (str(unknown) or self.text(node),))

    def _substitution(self, node: Node, builder: Builder, *, quoted: bool) -> None:
        """``$(...)``: the script's own folder and ``seq`` are known, other programs are not called."""
        text = " ".join(self.text(node).split())
        if re.search(r"BASH_SOURCE|dirname (-- )?\"?\$0", text) and re.search(r"dirname|pwd", text):
            folder = Path(self.scope.file).parent
            above = re.search(r"/((\.\./?)+)", text)
            found = folder.joinpath(*[".."] * above[1].count("..")) if above else folder
            builder.add(str(found))
        elif text == "$(pwd)":
            builder.add(".")
        elif sequence := re.fullmatch(r"\$\(seq (-?\d+)(?: (-?\d+))?(?: (-?\d+))?\)", text):
            numbers = [int(number) for number in sequence.groups() if number is not None]
            first, step, last = {1: (1, 1, *numbers), 2: (numbers[0], 1, numbers[-1])}.get(len(numbers), numbers)
            output = " ".join(str(n) for n in range(first, last + (1 if step > 0 else -1), step or 1))
            word = Word(output, self.scope.file, self.line(node))
            builder.add(output) if quoted else builder.split(word)
        else:
            builder.add(text, (text,))
