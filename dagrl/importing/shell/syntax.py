"""Parses bash with shfmt, the formatter of mvdan.cc/sh, which writes the syntax tree as JSON and executes nothing.

A node is a mapping: ``Type`` names the Go type of https://pkg.go.dev/mvdan.cc/sh/v3/syntax, its fields follow.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

from dagrl.importing.settings import ImportProblem

Node = dict[str, Any]


_BRACKET = re.compile(r"(?:.*?:)?(\d+):(\d+): `\[x\]` must be followed by `=`")


def parse(source: bytes, file: str) -> tuple[list[Node], bytes]:
    """Return the statements of a script, and the source that they are parsed from.

    ImportProblem, with file and line, if it is not bash.
    """
    program = Path(sysconfig.get_path("scripts")) / "shfmt"
    found = str(program) if program.is_file() else shutil.which("shfmt")
    if found is None:
        raise ImportProblem(
            "shfmt is not installed, which parses shell scripts; install it with `pip install shfmt-py`"
        )
    command = [found, "--to-json", "--language-dialect", "bash"]
    done = subprocess.run(command, input=source, capture_output=True, check=False)
    if done.returncode != 0:
        message = done.stderr.decode(errors="replace").strip().partition("\n")[0]
        if bracket := _BRACKET.fullmatch(message):
            return parse(_escaped(source, int(bracket[1]), int(bracket[2])), file)
        if place := re.fullmatch(r"(?:.*?:)?(\d+):\d+: (.*)", message):
            raise ImportProblem(f"{file}:{place[1]}: is not bash: {place[2]}")
        raise ImportProblem(f"{file}: is too long or too deeply nested for shfmt, the parser of bash ({message})")
    statements: list[Node] = json.loads(done.stdout).get("Stmts") or []
    return statements, source


def _escaped(source: bytes, line: int, column: int) -> bytes:
    """Put a backslash before a bracket: bash takes `[0]*3` in an array as a word, shfmt as an index without value."""
    lines = source.split(b"\n")
    lines[line - 1] = lines[line - 1][: column - 1] + b"\\" + lines[line - 1][column - 1 :]
    return b"\n".join(lines)


def line_of(node: Node) -> int:
    """The line of a node, from 1."""
    return int(node["Pos"]["Line"])


def offset_of(node: Node) -> int:
    """The place of a node's first byte, from 0."""
    return int(node["Pos"].get("Offset", 0))


def source_of(node: Node, source: bytes) -> str:
    """The text of a node."""
    return source[offset_of(node) : node["End"].get("Offset", 0)].decode(errors="replace")


def whole_number(text: str) -> int | None:
    """The number that decimal digits make; None for other texts, and for more digits than Python reads."""
    return int(text) if re.fullmatch(r"[-+]?[0-9]{1,300}", text) else None
