"""Walks a bash script and collects the commands that it would call, with expanded words.

Assignments, arrays, functions, ``source``, ``eval``, ``if``, ``case``, ``for`` over known words and ``set --`` are
followed; a part whose condition depends on the script's environment is left out, with a remark. No program is called,
and no file is read but the sourced ones.
"""

from __future__ import annotations

import fnmatch
import os.path
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from dagrl.importing.files import is_file, read_file
from dagrl.importing.shell import conditions
from dagrl.importing.shell.arithmetic import UnknownNumberError
from dagrl.importing.shell.conditions import Result
from dagrl.importing.shell.syntax import Node, parse, source_of, whole_number
from dagrl.importing.shell.words import Expander, Scope, Word

_WRAPPERS = frozenset({"builtin", "exec", "nohup", "time", "command", "env", "sudo"})
_CALLS = re.compile(r"\b(?:source|eval)\b|\bmain_\w+|\btrain\w*\.py")
_MATTERS = re.compile(rf"(?:^|[\s;&|(])[A-Za-z_]\w*\+?=|{_CALLS.pattern}")
"""Assignments, sourced files and calls of a trainer, in a part of a script."""


class _NotPureError(ValueError):
    """A substitution calls a program."""


def _output(name: str, arguments: list[str], folder: str) -> str | None:
    """Return the output of a command that depends on its arguments alone; the folder, for ``cd``; else None."""
    if name == "echo":
        return " ".join(arguments)
    if name == "pwd":
        return folder
    if name == "seq" and arguments and all(re.fullmatch(r"-?\d{1,9}", each) for each in arguments):
        numbers = [int(each) for each in arguments]
        first, step, last = numbers[0] if len(numbers) > 1 else 1, numbers[1] if len(numbers) > 2 else 1, numbers[-1]
        ends = range(first, last + (1 if step > 0 else -1), step) if step else range(0)
        return "\n".join(map(str, ends))
    if name in ("cd", "realpath", "readlink", "dirname", "basename") and len(arguments) == 1:
        path = PurePosixPath(arguments[0])
        return {"dirname": str(path.parent), "basename": path.name}.get(name, os.path.normpath(path))
    return None


@dataclass(frozen=True, slots=True)
class Remark:
    """A part of the script that was not read, and why."""

    file: str
    line: int
    message: str
    names: frozenset[str] = frozenset()
    """Variables that only this part sets: it does not matter where none of them is used. None: it matters always."""


@dataclass
class Script:
    """The commands of a script."""

    commands: list[list[Word]] = field(default_factory=list)
    remarks: list[Remark] = field(default_factory=list)


def read_script(path: Path, arguments: Iterable[str] = (), variables: Mapping[str, str] | None = None) -> Script:
    """Return the commands of a script as it is called with `arguments`, where the environment holds `variables`.

    ImportProblem if it cannot be read or is not bash.
    """
    walker = _Walker(path)
    walker.scope.positional = [Word(text, "command line", index) for index, text in enumerate(arguments, start=1)]
    for name, text in {"HOME": "~", "PWD": ".", **(variables or {})}.items():
        walker.scope.assign(name, Word(text, "--set", 1))
    walker.scope.fixed = frozenset(variables or ())
    walker.run_file(path)
    return walker.script


class _Walker:
    def __init__(self, path: Path) -> None:
        self.scope = Scope(str(path))
        self.script = Script()
        self.functions: dict[str, tuple[Node, Expander, str]] = {}
        self._printed: list[Word] | None = None
        """Lines that the commands of a substitution print; None outside of one."""
        self._kinds: dict[str, Callable[[Node, Expander], Result]] = {
            "CallExpr": self._command,
            "DeclClause": self._declaration,
            "BinaryCmd": self._binary,
            "IfClause": self._if,
            "CaseClause": self._case,
            "ForClause": self._for,
            "Block": lambda node, expander: self._all(node.get("Stmts"), expander),
            "Subshell": self._subshell,
            "TestClause": lambda node, expander: conditions.of_clause(node["X"], expander),
            "ArithmCmd": lambda node, expander: self._arithmetic([node["X"]], expander),
            "LetClause": lambda node, expander: self._arithmetic(node["Exprs"], expander),
            "TimeClause": lambda node, expander: self._all([node["Stmt"]] if node.get("Stmt") else [], expander),
            "FuncDecl": self._declare_function,
        }

    def run_file(self, path: Path) -> None:
        source = read_file(path)
        outer, self.scope.file = self.scope.file, str(path)
        statements, source = parse(source, str(path))
        self._all(statements, Expander(self.scope, source, substitute=self._substitute))
        self.scope.file = outer

    def _remark(self, line: int, message: str, names: frozenset[str] = frozenset()) -> None:
        remark = Remark(self.scope.file, line, message, names)
        if remark not in self.script.remarks:
            self.script.remarks.append(remark)

    def _all(self, statements: list[Node] | None, expander: Expander) -> Result:
        """Follow statements; whether the last one succeeds, None if that is unknown."""
        result: Result = True
        for statement in statements or ():
            command = statement.get("Cmd")
            if command is None:
                continue
            follow = self._kinds.get(command["Type"])
            if follow is None:
                self._leave_out(command, expander, "it is a loop whose end depends on the environment")
                result = None
            else:
                result = follow(command, expander)
            if statement.get("Negated"):
                result = conditions.negated(result)
        return result

    def _assign(self, node: Node, expander: Expander) -> None:
        name = node["Name"]["Value"]
        if node.get("Naked"):
            return
        append = bool(node.get("Append"))
        if node.get("Array"):
            self._assign_array(name, node["Array"].get("Elems") or (), expander, append=append)
            return
        value = expander.single(node.get("Value"), expander.line(node))
        if not node.get("Index"):
            self.scope.assign(name, value, append=append)
        elif key := expander.subscript(name, node["Index"]):
            self.scope.assign_element(name, key, value, append=append)
        else:
            self._remark(expander.line(node), f"sets an element of {name} that only the environment knows")

    def _assign_array(self, name: str, elements: Iterable[Node], expander: Expander, *, append: bool) -> None:
        # All values come first: they may be the array's own, as in `ARGS=("${ARGS[@]}" more)`.
        found = [
            (index, [expander.single(each.get("Value"))] if index else expander.words(each["Value"]))
            for each in elements
            if (index := each.get("Index")) or each.get("Value")
        ]
        if not append:
            self.scope.assign(name, [])
        for index, words in found:
            if not index:
                self.scope.assign(name, words, append=True)
            elif key := expander.subscript(name, index):
                self.scope.assign_element(name, key, words[0])

    def _declaration(self, node: Node, expander: Expander) -> Result:
        options = [expander.single(each["Value"]).text for each in node.get("Args") or () if not each.get("Name")]
        if any(option.startswith("-") and "A" in option for option in options):
            self.scope.associative.update(each["Name"]["Value"] for each in node["Args"] if each.get("Name"))
        for each in node.get("Args") or ():
            if each.get("Name"):
                self._assign(each, expander)
        return True

    def _command(self, node: Node, expander: Expander) -> Result:
        """A command. Assignments before its name set the environment of the program alone."""
        words = [word for each in node.get("Args") or () for word in expander.words(each)]
        if words:
            return self._call(words)
        for each in node.get("Assigns") or ():
            self._assign(each, expander)
        return True

    def _substitute(self, statements: list[Node], expander: Expander) -> Word | None:
        """Return the output of ``$(...)``, if its commands print only their arguments."""
        outer, self._printed = self._printed, []
        scalars, arrays, positional = dict(self.scope.scalars), dict(self.scope.arrays), self.scope.positional
        try:
            self._all(statements, expander)
            text = "\n".join(word.text for word in self._printed).rstrip("\n")
            missing = tuple(name for word in self._printed for name in word.missing)
            return Word(text, self.scope.file, 0, missing)
        except _NotPureError:
            return None
        finally:
            self._printed = outer
            self.scope.scalars, self.scope.arrays, self.scope.positional = scalars, arrays, positional

    def _print(self, words: list[Word]) -> Result:
        """Follow a command of a substitution. _NotPureError if only a program knows its output."""
        assert self._printed is not None
        name, arguments = words[0], [word for word in words[1:] if word.text not in ("--", "-f", "-m", "-n", "-P")]
        missing = tuple(each for word in arguments for each in word.missing)
        text = _output(name.text, [word.text for word in arguments], str(self.scope.parameter("PWD").text))  # type: ignore[union-attr]
        if text is None or any(each.startswith("$(") for each in missing):
            raise _NotPureError(name.text)
        if name.text == "cd":
            self.scope.scalars["PWD"] = Word(text, self.scope.file, name.line, missing)
        else:
            self._printed.append(Word(text, self.scope.file, name.line, missing))
        return True

    def _call(self, words: list[Word]) -> Result:
        name, arguments = words[0], words[1:]
        if self._printed is not None and name.text not in ("[", "test", "true", "false"):
            return self._print(words)
        if name.text in ("source", ".") and arguments:
            self._source(arguments[0])
        elif name.text == "eval":
            return self._eval(arguments)
        elif name.text == "set" and arguments and arguments[0].text == "--":
            self.scope.positional = arguments[1:]
        elif name.text == "shift":
            count = whole_number(arguments[0].text) if arguments else 1
            if count is not None and 0 <= count <= len(self.scope.positional):  # As bash, which changes nothing else.
                self.scope.positional = self.scope.positional[count:]
        elif name.text == "unset":
            for each in arguments:
                self.scope.unset(each.text)
        elif name.text in ("test", "["):
            return conditions.of_command(arguments[:-1] if name.text == "[" else arguments)
        elif name.text in ("true", ":"):
            return True
        elif name.text == "false":
            return False
        elif name.text in self.functions:
            return self._function(name.text, arguments)
        elif name.text in _WRAPPERS and arguments:
            return self._call(arguments)
        else:
            self.script.commands.append(words)
        return True

    def _declare_function(self, node: Node, expander: Expander) -> Result:
        self.functions[node["Name"]["Value"]] = (node["Body"], expander, self.scope.file)
        return True

    def _function(self, name: str, arguments: list[Word]) -> Result:
        body, expander, file = self.functions[name]
        outer = self.scope.positional, self.scope.file
        self.scope.positional, self.scope.file = arguments, file
        result = self._all([body], expander)
        self.scope.positional, self.scope.file = outer
        return result

    def _source(self, name: Word) -> None:
        path = Path(name.text)
        if not path.is_absolute() and not is_file(path):
            path = Path(self.scope.file).parent / path
        if name.missing or not is_file(path):
            self._remark(name.line, f"sources {name.text}, which is not here; what it sets is missing")
        else:
            self.run_file(path)

    def _eval(self, words: list[Word]) -> Result:
        """Follow the statements that the words make together. Text in a word keeps the line of the word."""
        if not words:
            return True
        source, lines = b"", []
        for word in words:
            lines.append((len(source), word.line))
            source += word.text.encode() + b" "
        statements, source = parse(source, f"{words[0].file}:{words[0].line}")
        expander = Expander(self.scope, source, substitute=self._substitute, lines=lines)
        return self._all(statements, expander)

    def _binary(self, node: Node, expander: Expander) -> Result:
        result = self._all([node["X"]], expander)
        if node["Op"] in ("|", "|&"):
            return self._all([node["Y"]], expander)
        if result is None:
            self._leave_out(node["Y"], expander, "it follows a test that depends on the environment")
            return None
        return self._all([node["Y"]], expander) if result == (node["Op"] == "&&") else result

    def _if(self, node: Node, expander: Expander) -> Result:
        """``if``: the branch whose condition is known to hold."""
        branch: Node | None = node
        while branch is not None:
            called = len(self.script.commands)
            result = self._all(branch.get("Cond"), expander)
            # Elsewhere programs are taken to succeed, as in `mkdir logs && python ...`. Here their answer is asked for.
            if result is None or len(self.script.commands) > called:
                self._leave_out(branch, expander, "the condition depends on the environment")
                return None
            if result:
                return self._all(branch.get("Then"), expander)
            branch = branch.get("Else")
        return True

    def _case(self, node: Node, expander: Expander) -> Result:
        word = expander.single(node["Word"])
        if word.missing:
            self._leave_out(node, expander, "the case depends on the environment")
            return None
        for item in node.get("Items") or ():
            patterns = [expander.single(pattern).text for pattern in item["Patterns"]]
            if any(fnmatch.fnmatchcase(word.text, pattern) for pattern in patterns):
                return self._all(item.get("Stmts"), expander)
        return True

    def _for(self, node: Node, expander: Expander) -> Result:
        loop = node["Loop"]
        words = [word for item in loop.get("Items") or () for word in expander.words(item)]
        if loop["Type"] != "WordIter" or any(word.missing for word in words):
            self._leave_out(node, expander, "the loop depends on the environment")
            return None
        for word in words:
            self.scope.assign(loop["Name"]["Value"], word)
            self._all(node.get("Do"), expander)
        return True

    def _subshell(self, node: Node, expander: Expander) -> Result:
        outer = dict(self.scope.scalars), dict(self.scope.arrays), self.scope.positional
        result = self._all(node.get("Stmts"), expander)
        self.scope.scalars, self.scope.arrays, self.scope.positional = outer
        return result

    def _arithmetic(self, expressions: list[Node], expander: Expander) -> Result:
        result: Result = None
        for each in expressions:
            try:
                result = expander.number(each) != 0
            except UnknownNumberError:
                result = None
        return result

    def _leave_out(self, node: Node, expander: Expander, why: str) -> None:
        """Remark a part that is left out, if it may change settings or start the training."""
        if self._printed is not None:
            raise _NotPureError(why)
        text = source_of(node, expander.source)
        if _MATTERS.search(text):
            names = re.findall(r"\$\{?([A-Za-z_]\w*)", text.split("\n", 1)[0])
            unknown = [name for name in names if (word := self.scope.parameter(name)) is not None and word.missing]
            hint = f"; give --set {(unknown or names)[0]}=VALUE" if names else ""
            assigned = frozenset(re.findall(r"(?:^|[\s;&|(])([A-Za-z_]\w*)\+?=", text))
            is_new = not any(self.scope.array(name) for name in assigned) and not _CALLS.search(text)
            self._remark(expander.line(node), f"is left out, as {why}{hint}", assigned if is_new else frozenset())
