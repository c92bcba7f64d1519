"""Walks a bash script and collects the commands that it would call, with expanded words.

Assignments, arrays, functions, ``source``, ``eval``, ``if``, ``case``, ``for`` over known words and ``set --`` are followed;
a branch whose condition depends on the script's environment is left out and noted. No program is called and no file is
read but the sourced ones.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from dagrl.importing.settings import ImportProblem
from dagrl.importing.shell import conditions
from dagrl.importing.shell.words import Expander, Scope, Word

if TYPE_CHECKING:
    from tree_sitter import Node

_MOST_BYTES = 1024 * 1024
_MOST_STATEMENTS = 50_000
_MOST_DEPTH = 30
_WORD_TYPES = frozenset(
    """word number string raw_string ansi_c_string translated_string simple_expansion expansion concatenation
    command_substitution process_substitution arithmetic_expansion brace_expression regex extglob_pattern""".split()
)
_QUIET = frozenset({"echo", "exit", "printf", "sleep", "ray", "pkill", "export", "set", "shift", "mkdir", "cd", "unset"})


@dataclass(frozen=True, slots=True)
class Remark:
    """A part of the script that was not read, and why."""

    file: str
    line: int
    message: str


@dataclass
class Script:
    """The commands of a script."""

    commands: list[list[Word]] = field(default_factory=list)
    remarks: list[Remark] = field(default_factory=list)


def read_script(path: Path, arguments: Iterable[str] = (), variables: Mapping[str, str] | None = None) -> Script:
    """Return the commands of a script as it is called with `arguments`, where the environment holds `variables`."""
    walker = _Walker(path)
    scope = walker.scope
    scope.positional = [Word(text, "command line", index + 1) for index, text in enumerate(arguments)]
    home = {"HOME": "~", "PWD": "."}
    for name, text in {**home, **(variables or {})}.items():
        scope.assign(name, Word(text, "--set", 1))
        walker.fixed |= {name} if variables and name in variables else set()
    walker.run_file(path)
    return walker.script


class _Walker:
    def __init__(self, path: Path) -> None:
        self.scope = Scope(str(path))
        self.script = Script()
        self.functions: dict[str, tuple[Node, bytes, str]] = {}
        self.fixed: set[str] = set()
        """Variables that the caller sets: an assignment of the script does not change them."""
        self._statements = 0
        self._depth = 0

    def run_file(self, path: Path) -> None:
        try:
            source = path.read_bytes()
        except OSError as error:
            raise ImportProblem(f"{path} cannot be read ({error.strerror}); check the path") from error
        if len(source) > _MOST_BYTES:
            raise ImportProblem(f"{path} has more than {_MOST_BYTES} bytes; give the launch script")
        outer, self.scope.file = self.scope.file, str(path)
        self._run_source(source, 0)
        self.scope.file = outer

    def _run_source(self, source: bytes, base_line: int) -> None:
        source, root = parsed(source)
        if root.has_error and (broken := _first_error(root)) is not None:
            line = broken.start_point[0] + 1 + base_line
            self._remark(line, "cannot be parsed as bash; commands around it may be missing")
        self._run(root, Expander(self.scope, source, base_line))

    def _remark(self, line: int, message: str) -> None:
        remark = Remark(self.scope.file, line, message)
        if remark not in self.script.remarks:
            self.script.remarks.append(remark)

    def _run(self, node: Node, expander: Expander) -> bool | None:
        """Follow a statement; whether it succeeds, None if that is unknown."""
        self._statements += 1
        if self._statements > _MOST_STATEMENTS:
            raise ImportProblem(f"{self.scope.file} has more than {_MOST_STATEMENTS} statements")
        kind = node.type
        if kind in ("program", "compound_statement", "subshell", "do_group", "else_clause", "ERROR"):
            return self._run_all(node, expander)
        if kind == "redirected_statement":
            return self._run(node.children[0], expander)
        if kind == "pipeline":
            results = [self._run(child, expander) for child in node.children if child.is_named]
            return results[-1] if results else None
        if kind == "variable_assignment":
            self._assign(node, expander)
            return True
        if kind in ("variable_assignments", "declaration_command"):
            for child in node.children:
                if child.type == "variable_assignment":
                    self._assign(child, expander)
            return True
        if kind == "command":
            return self._command(node, expander)
        if kind == "test_command":
            return conditions.evaluate(_tokens(node, expander))
        if kind == "negated_command":
            result = self._run(node.children[-1], expander)
            return None if result is None else not result
        if kind == "list":
            return self._list(node, expander)
        if kind == "if_statement":
            return self._if(node, expander)
        if kind == "case_statement":
            return self._case(node, expander)
        if kind == "for_statement":
            return self._for(node, expander)
        if kind == "function_definition":
            name = expander.text(node.child_by_field_name("name") or node.children[0])
            self.functions[name] = (node.child_by_field_name("body") or node.children[-1], expander.source, expander.scope.file)
            return True
        if kind == "unset_command":
            for child in node.children:
                if child.type in ("variable_name", "word"):
                    self.scope.unset(expander.text(child))
            return True
        if kind in ("while_statement", "c_style_for_statement"):
            self._leave_out(node, expander, "a loop whose end depends on the environment")
            return None
        return None

    def _run_all(self, node: Node, expander: Expander) -> bool | None:
        result: bool | None = True
        for child in node.children:
            if child.is_named and child.type != "comment":
                result = self._run(child, expander)
        return result

    def _assign(self, node: Node, expander: Expander) -> None:
        name_node, value = node.children[0], node.child_by_field_name("value")
        name = expander.text(name_node)
        append = any(child.type == "+=" for child in node.children)
        if name in self.fixed or not re.fullmatch(r"\w+", name):
            return
        if value is not None and value.type == "array":
            elements = [word for child in value.children if child.type in _WORD_TYPES for word in expander.words(child)]
            self.scope.assign(name, elements, append=append)
        else:
            self.scope.assign(name, expander.single(value, at=expander.line(node)), append=append)

    def _command(self, node: Node, expander: Expander) -> bool | None:
        """A command. Assignments before its name set the environment of the program alone."""
        words: list[Word] = []
        for child in node.children:
            if child.type in _WORD_TYPES or child.type == "command_name":
                words += expander.words(child)
        if not words:
            for child in node.children:
                if child.type == "variable_assignment":
                    self._assign(child, expander)
            return True
        return self._call(words)

    def _call(self, words: list[Word]) -> bool | None:
        name, arguments = words[0], words[1:]
        if name.text in ("source", ".") and arguments:
            self._source(arguments[0])
        elif name.text == "eval":
            return self._eval(arguments)
        elif name.text == "set" and arguments and arguments[0].text == "--":
            self.scope.positional = arguments[1:]
        elif name.text == "shift":
            self.scope.positional = self.scope.positional[int(arguments[0].text) if arguments else 1 :]
        elif name.text in ("test", "["):
            operators = {"=", "==", "!=", "!", "-a", "-o", "(", ")", "-z", "-n", "-eq", "-ne", "-lt", "-le", "-gt", "-ge"}
            operands = [word for word in arguments if word.text != "]"]
            return conditions.evaluate([word.text if word.text in operators else word for word in operands])
        elif name.text in ("false", "exit", "return"):
            return name.text != "false"
        elif name.text in self.functions:
            return self._function(name.text, arguments)
        elif name.text in ("exec", "nohup", "time", "command", "env"):
            return self._call(arguments) if arguments else True
        else:
            self.script.commands.append(words)
        return True

    def _function(self, name: str, arguments: list[Word]) -> bool | None:
        if self._depth >= _MOST_DEPTH:
            self._remark(1, f"{name} calls itself; not followed further")
            return None
        body, source, file = self.functions[name]
        outer, self.scope.positional = self.scope.positional, arguments
        outer_file, self.scope.file = self.scope.file, file
        self._depth += 1
        result = self._run(body, Expander(self.scope, source))
        self._depth -= 1
        self.scope.positional, self.scope.file = outer, outer_file
        return result

    def _source(self, name: Word) -> None:
        path = Path(name.text)
        if not path.is_absolute() and not path.is_file():
            path = Path(self.scope.file).parent / path
        if name.missing or not path.is_file():
            self._remark(name.line, f"{name.text} is not here; its settings are missing")
        elif self._depth < _MOST_DEPTH:
            self._depth += 1
            self.run_file(path)
            self._depth -= 1

    def _eval(self, words: list[Word]) -> bool | None:
        """Expand each word once more, at its own line, and call the result."""
        expanded: list[Word] = []
        for word in words:
            before = len(self.script.commands)
            self._run_source(f"EVAL_WORD {word.text}".encode(), word.line - 1)
            for command in self.script.commands[before:]:
                expanded += command[1:] if command[0].text == "EVAL_WORD" else []
            del self.script.commands[before:]
        return self._call(expanded) if expanded else True

    def _list(self, node: Node, expander: Expander) -> bool | None:
        left, operator, right = node.children[0], node.children[1].type, node.children[-1]
        result = self._run(left, expander)
        if operator == "&&" and result is False:
            return False
        if operator == "||" and result is True:
            return True
        if result is None:
            self._leave_out(right, expander, "it follows a test that depends on the environment")
            return None
        return self._run(right, expander)

    def _if(self, node: Node, expander: Expander) -> bool | None:
        """``if``: the branch whose condition is known to hold."""
        branches: list[tuple[list[Node], list[Node]]] = [_branch(node)]
        branches += [_branch(child) for child in node.children if child.type == "elif_clause"]
        otherwise = next((child for child in node.children if child.type == "else_clause"), None)
        for condition, body in branches:
            result: bool | None = None
            for each in condition:
                result = self._run(each, expander)
            if result is None:
                self._leave_out(node, expander, "the condition depends on the environment")
                return None
            if result:
                for each in body:
                    self._run(each, expander)
                return True
        return self._run_all(otherwise, expander) if otherwise is not None else True

    def _case(self, node: Node, expander: Expander) -> bool | None:
        value = node.child_by_field_name("value")
        word = expander.single(value)
        if word.missing:
            self._leave_out(node, expander, "the case depends on the environment")
            return None
        import fnmatch

        for item in node.children:
            if item.type != "case_item":
                continue
            patterns = [item.child_by_field_name("value"), *item.children_by_field_name("value")]
            texts = [expander.single(pattern).text for pattern in patterns if pattern is not None]
            if any(fnmatch.fnmatchcase(word.text, text) for text in texts):
                closed = False
                for child in item.children:
                    if closed and child.is_named and child.type != "comment":
                        self._run(child, expander)
                    closed = closed or child.type == ")"
                return True
        return True

    def _for(self, node: Node, expander: Expander) -> bool | None:
        variable = node.child_by_field_name("variable")
        body = node.child_by_field_name("body")
        words = [word for child in node.children_by_field_name("value") for word in expander.words(child)]
        if variable is None or body is None or any(word.missing for word in words) or len(words) > 1000:
            self._leave_out(node, expander, "the loop depends on the environment")
            return None
        for word in words:
            self.scope.assign(expander.text(variable), word)
            self._run(body, expander)
        return True

    def _leave_out(self, node: Node, expander: Expander, why: str) -> None:
        """Remark a part that is left out, unless it only prints, waits or starts Ray."""
        names = re.findall(r"^\s*(\w[\w-]*)", expander.text(node), re.MULTILINE)
        words = set(names) - {"if", "then", "else", "elif", "fi", "do", "done", "for", "while", "case", "esac", "in"}
        if words - _QUIET:
            variables = re.findall(r"\$\{?(\w+)", expander.text(node).split("\n", 1)[0])
            hint = f"; give --set {variables[0]}=VALUE" if variables else ""
            self._remark(expander.line(node), f"is left out, as {why}{hint}")


def parsed(source: bytes) -> tuple[bytes, Node]:
    """Return the source with its syntax tree.

    tree-sitter-bash takes a line of several assignments and the command of the next line for one command. A ``;``
    after the assignments separates them, and leaves all line numbers as they are.
    """
    import tree_sitter
    import tree_sitter_bash

    parser = tree_sitter.Parser(tree_sitter.Language(tree_sitter_bash.language()))
    while True:
        root = parser.parse(source).root_node
        end = _end_of_assignments(root, source)
        if end is None:
            return source, root
        source = source[:end] + b";" + source[end:]


def _end_of_assignments(node: Node, source: bytes) -> int | None:
    """Where a line of assignments ends that the parser has joined to the next line's command."""
    if node.type == "command":
        for child, following in pairwise(node.children):
            between = source[child.end_byte : following.start_byte]
            if child.type == "variable_assignment" and b"\n" in between.replace(b"\\\n", b""):
                return child.end_byte
    return next((end for child in node.children if (end := _end_of_assignments(child, source)) is not None), None)


def _branch(node: Node) -> tuple[list[Node], list[Node]]:
    """Conditions and body of an ``if`` or ``elif``."""
    condition: list[Node] = []
    body: list[Node] = []
    part = condition
    for child in node.children:
        if child.type == "then":
            part = body
        elif child.type in ("elif_clause", "else_clause"):
            break
        elif child.is_named and child.type != "comment":
            part.append(child)
    return condition, body


def _tokens(node: Node, expander: Expander) -> list[Word | str]:
    """Operators and operands of a test, in order."""
    tokens: list[Word | str] = []
    for child in node.children:
        if child.type in ("[", "]", "[[", "]]"):
            continue
        if child.type in _WORD_TYPES or child.type == "variable_name":
            tokens.append(expander.single(child))
        elif child.named_child_count or child.type in ("binary_expression", "unary_expression"):
            tokens += _tokens(child, expander)
        else:
            tokens.append(expander.text(child))
    return tokens


def _first_error(node: Node) -> Node | None:
    if node.type == "ERROR" or node.is_missing:
        return node
    return next((found for child in node.children if child.has_error and (found := _first_error(child))), None)
