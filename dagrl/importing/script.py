"""Reads a bash script: bash runs it in the sandbox of model-written code, and traces the commands that it would call.

Its PATH is empty: every command except bash's builtins is only traced. A variable that the script does not set has its
own name as value, such as ``$CKPT``, and so has the output of a program, such as ``$(nvidia-smi)``.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from dagrl.importing.files import is_file, read_file
from dagrl.importing.plain_script import read_plain_script
from dagrl.importing.settings import ImportProblem, Remark, Word
from dagrl.rewards.sandbox import Outcome, Result, run_bash

_CPU_SECONDS, _SECONDS, _MEMORY_MIB = 2, 4, 192
"""Limits of bash. Scripts of the frameworks take less than 0.1 s."""
_MARK = "\1"
_PS4 = f"+{_MARK}${{BASH_SOURCE-}}{_MARK}${{LINENO}}{_MARK}${{PWD}}{_MARK} "
_PRELUDE = r"""
exec 9>&1 >/dev/null
builtin ulimit -t "$DAGRL_SECONDS"
command_not_found_handle() { builtin printf '$(%s)' "$1"; }
exit() { :; }
exec() { :; }
pwd() { builtin echo "$PWD"; }
dirname() { local p=${!#}; [[ $p == */* ]] && p=${p%/*} || p=.; builtin echo "${p:-/}"; }
basename() { local p=${1%/}; p=${p##*/}; builtin echo "${p%"${2-}"}"; }
realpath() { local p=${!#}; [[ -d $p ]] && p=$(builtin cd -- "$p" && builtin echo "$PWD"); builtin echo "$p"; }
readlink() { realpath "$@"; }
seq() {
  local first=1 step=1 last=${!#}
  (($# > 1)) && first=$1
  (($# > 2)) && step=$2
  for ((; step > 0 ? first <= last : step && first >= last; first += step)); do builtin echo "$first"; done
}
builtin cd -- "$DAGRL_FOLDER"
builtin unset DAGRL_FOLDER DAGRL_SECONDS OLDPWD
PATH=/nonexistent HOME='~' PWD=. BASH_XTRACEFD=9
builtin set -T
"""
"""``exit`` does not end the trace, and ``exec`` does not replace bash."""
_EACH = "builtin set +eu -x"
"""Runs before each command: a failure does not end the trace, and all commands are traced."""

_NAME = r"[A-Za-z_]\w*"
_COMMENT = re.compile(r"^\s*#.*$", re.MULTILINE)
_REFERENCE = re.compile(rf"\$\{{[#!]?({_NAME})(?:\[[^]]*\])?(:?[-=+])?|\$({_NAME})")
_NUMBER = re.compile(r"\(\(([^()]*)\)\)")
_ASKED = re.compile(rf'-[nz]\s+"?\$\{{({_NAME}):?-\}}')
_PARTLY_SET = re.compile(
    rf"(?<!\w)({_NAME})(?:\[[^]\n]*\]|\+=)|\bfor\s+({_NAME})"
    r"|\b(?:declare|local|typeset|read|mapfile|readarray|printf -v)\b([^\n;]*)"
)
_ARGUMENT = re.compile(r"\$(?:\{([1-9])(?::?\?[^}]*)?\}|([1-9]))")
_OWN = frozenset(
    {"HOME", "PWD", "OLDPWD", "PATH", "PS4", "RANDOM", "SECONDS", "UID", "EUID", "PPID", "LINENO", "FUNCNAME"}
)
_CONDITION = re.compile(r"\s*(?:if|elif|case|while|until)\b|.*\]\]?\s*(?:&&|\|\|)")
_MATTERS = re.compile(r"(?:^|[\s;&|(])[A-Za-z_]\w*\+?=|\b(?:source|eval)\b|\bmain_\w+|\btrain\w*\.py", re.MULTILINE)
"""Assignments, sourced files and calls of a trainer."""
_ASKS = re.compile(r"\s-[defrsx]\s|\s*(?:if|elif|while|until)\s+!?\s*(?!\[|\(\(|test\b|true\b|false\b|!)")
"""In a condition: whether a file exists, or a program succeeds."""
_NO_CALL = re.compile(rf"{_NAME}\+?=|(?:eval|echo|printf|local|export|declare|readonly)\s")
"""Statements inside ``eval`` are traced separately."""
_NO_MEMORY = "cannot allocate"
_OUTPUT = re.compile(r"\$\([^()]*\)")


@dataclass
class Script:
    """The commands of a script."""

    commands: list[list[Word]] = field(default_factory=list)
    remarks: list[Remark] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Call:
    file: str
    line: int
    folder: str
    text: str

    def words(self) -> list[str]:
        try:
            return shlex.split(self.text)
        except ValueError:  # An assignment.
            return []


def read_script(
    path: Path, program: re.Pattern[str], arguments: Iterable[str] = (), variables: Mapping[str, str] | None = None
) -> Script:
    """Return the commands of a script that contain `program`, and remarks on parts that depend on the environment.

    ImportProblem if it cannot be read or is not bash.

    Args:
        path: the script.
        program: the name of a program, in a command.
        arguments: the arguments that the script is called with.
        variables: variables of the environment, which also replace the script's own values.
    """
    texts, arguments, variables = {str(path): read_file(path).decode(errors="replace")}, [*arguments], variables or {}
    while True:
        unset = _unset_names(texts.values()) - {*variables}
        try:
            result = _run(path, unset, [*arguments, *_unset_arguments(texts[str(path)])[len(arguments) :]], variables)
        except OSError as error:
            return Script(read_plain_script(path, texts[str(path)], arguments, variables, str(error)))
        calls = [*_calls(result.stdout, path)]
        files = {call.file for call in calls if call.file not in texts and is_file(Path(call.file))}
        texts = {file: read_file(Path(file)).decode(errors="replace") for file in sorted(files)} | texts
        if not _unset_names(texts.values()) - {*variables} - unset:
            break
    script = Script(remarks=[*_faults(result.stderr, path, unset), *_conditions(texts, calls, unset)])
    for call in calls:
        if not _NO_CALL.match(call.text) and program.search(call.text):
            places = {text: ("command line", number) for number, text in enumerate(arguments, start=1)}
            words = ((text, *(places.get(text) or _place(text, call, texts))) for text in call.words())
            script.commands.append([Word(*word, _missing(word[0], unset)) for word in words])
        elif call.text.startswith(("source ", ". ")) and (names := call.words()[1:]) and not _is_read(names[0], call):
            missing = Remark(
                call.file, call.line, f"sources {names[0]}, which does not exist here; its settings are missing"
            )
            script.remarks.append(missing)
    if result.exit_status < 0 or result.outcome in (Outcome.TIMED_OUT, Outcome.TOO_MUCH) or _NO_MEMORY in result.stderr:
        limits = f"reading it takes more than {_CPU_SECONDS} s or {_MEMORY_MIB} MiB"
        if not script.commands:
            raise ImportProblem(f"{path}: {limits}; shorten its loops and values")
        script.remarks.append(Remark(calls[-1].file, calls[-1].line, f"{limits}; what follows is missing"))
    return script


def _run(path: Path, unset: Iterable[str], arguments: list[str], variables: Mapping[str, str]) -> Result:
    """Run a script. OSError if this machine cannot confine it."""
    script, here = path.absolute(), Path.cwd()
    root = next((folder for folder in script.parents if (folder / ".git").exists()), None)
    folder = here if script.is_relative_to(here) else root or script.parent
    fixed = "".join(f"; {name}={shlex.quote(text)}" for name, text in variables.items())
    trap = shlex.quote(f"PS4={shlex.quote(_PS4)}; {_EACH}{fixed}")
    return run_bash(
        f'{_PRELUDE}builtin trap {trap} DEBUG\nbuiltin source "$0" "$@"\nbuiltin wait\n',
        visible=[str(root or folder), str(script)],
        arguments=[str(script), *arguments],
        environment={
            **{name: f"${name}" for name in unset},
            **variables,
            "DAGRL_FOLDER": str(folder),
            "DAGRL_SECONDS": str(_CPU_SECONDS),
        },
        timeout_s=_SECONDS,
        memory_mib=_MEMORY_MIB,
    )


def _calls(trace: str, path: Path) -> Iterator[_Call]:
    script = str(path.absolute())
    for record in re.split(rf"(?:^|\n)\++{_MARK}", trace):
        file, *rest = record.split(_MARK, 3)
        if len(rest) == 3 and file not in ("", "environment") and not rest[2].startswith((f" {_EACH}", " PS4=")):
            yield _Call(str(path) if file == script else file, int(rest[0]), rest[1], rest[2].strip())


def _faults(errors: str, path: Path, unset: set[str]) -> Iterator[Remark]:
    """Remark on numbers computed from unset variables. ImportProblem for anything but bash."""
    for fault in re.finditer(r"^(/.*): line (\d+): (.*)", errors, re.MULTILINE):
        file = str(path) if fault[1] == str(path.absolute()) else fault[1]
        if re.match(r"syntax error|unexpected EOF", fault[3]) and not file.endswith(": eval"):
            raise ImportProblem(f"{file}:{fault[2]}: is not bash: {fault[3]}")
        names = [name for name in re.findall(rf"\$({_NAME})", fault[3]) if name in unset]
        if "syntax error" in fault[3] and names:
            yield Remark(
                file, int(fault[2]), f"computes with {names[0]}, which is not set; give --set {names[0]}=VALUE"
            )


def _unset_names(texts: Iterable[str]) -> set[str]:
    """Variables that scripts use without a default. Scripts set some of them."""
    plain: set[str] = set()
    others = {*_OWN}
    for text in (_ASKED.sub(r"$\1", _COMMENT.sub("", text)) for text in texts):
        for braced, operator, bare in _REFERENCE.findall(text):
            (others if operator else plain).add(braced or bare)
        plain.update(name for number in _NUMBER.findall(text) for name in re.findall(_NAME, number))
        for indexed, counted, declared in _PARTLY_SET.findall(text):
            others.update([indexed, counted, *re.findall(_NAME, declared)])
    return {name for name in plain - others if not name.startswith("BASH")}


def _unset_arguments(text: str) -> list[str]:
    """Values for the arguments that a script uses by number, unless it also uses all of them."""
    if re.search(r"\$\{?[@*#]|\bshift\b", _COMMENT.sub("", text)):
        return []
    numbers = [int(braced or bare) for braced, bare in _ARGUMENT.findall(text)]
    return [f"${number}" for number in range(1, max(numbers, default=0) + 1)]


def _conditions(texts: Mapping[str, str], calls: Iterable[_Call], unset: set[str]) -> Iterator[Remark]:
    """Remark on conditions that depend on the environment."""
    for file, line in dict.fromkeys((call.file, call.line) for call in calls if call.file in texts):
        lines = texts[file].splitlines()[line - 1 :]
        text = lines[0] if lines else ""
        if not _CONDITION.match(text) or not _MATTERS.search(_block(lines)):
            continue
        names = [name for name in re.findall(rf"\$\{{?({_NAME})", text) if name in unset]
        names = [name for name in names if not re.search(rf"(?<!\w){name}=", "\n".join(texts.values()))]
        if names:
            yield Remark(file, line, f"depends on {names[0]}, which is not set; give --set {names[0]}=VALUE")
        elif _ASKS.search(text):
            yield Remark(
                file, line, "depends on the machine: programs are taken to succeed, and files to be as they are here"
            )


def _block(lines: list[str]) -> str:
    """The lines of a condition: by its indentation, up to the word that ends it."""
    margin = re.match(r"\s*", lines[0])
    end = re.compile(rf"{margin[0] if margin else ''}(fi|esac|done)\b")
    last = next((number for number, line in enumerate(lines) if end.match(line)), 0)
    return "\n".join(lines[: last + 1])


def _is_read(name: str, call: _Call) -> bool:
    return is_file(Path(call.folder) / name) or is_file(Path(call.file).parent / name)


def _missing(text: str, unset: set[str]) -> tuple[str, ...]:
    """The unknown variables, arguments and programs in a word."""
    names = [f"${name}" for name in re.findall(rf"\$({_NAME}|[1-9])", text) if name in unset or name.isdigit()]
    return (*names, *_OUTPUT.findall(text))


def _place(text: str, call: _Call, texts: Mapping[str, str]) -> tuple[str, int]:
    """The file and line that hold a word ``key=value`` or ``--key``, or else those of the command."""
    key = re.match(r"--[\w-]+=?|[+~]*[\w./@-]+=|[\w./-]+\.py$", text)
    if key is None:
        return call.file, call.line
    pattern = re.compile(rf"(?<![\w./-]){re.escape(key[0])}" + ("" if key[0].endswith("=") else r"(?![\w-])"))
    best, place = 0, (call.file, call.line)
    for file, content in texts.items():
        for number, line in enumerate(content.splitlines(), start=1):
            if key[0] in line and not line.lstrip().startswith("#") and pattern.search(line):
                fit = 2 if text in line else 1
                if fit >= best:
                    best, place = fit, (file, number)
    return place
