"""The help of every command: it has examples that parse, and says which commands print JSON."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from typing import Any

import pytest
from typer.main import get_command

from dagrl.cli import app, main

WITHOUT_JSON = {
    "run": "a run writes metrics.jsonl",
    "launch": "as run",
    "ui": "serves until it is stopped",
    "agent try": "prints a conversation for reading",
}
"""Commands that no program reads, and why."""


def leaves(command: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Commands without subcommands, by the words after `dagrl`."""
    if not hasattr(command, "commands"):
        yield name, command
        return
    for word, inner in command.commands.items():
        yield from leaves(inner, f"{name} {word}".strip())


ROOT = get_command(app)
COMMANDS = dict(leaves(ROOT))
GROUPS = {"": ROOT} | {name: command for name, command in ROOT.commands.items() if hasattr(command, "commands")}


def examples(command: Any) -> list[str]:
    return re.findall(r"^ +((?:\w+=\S+ )*dagrl .*)$", command.epilog or "", re.MULTILINE)


@pytest.mark.parametrize("name", COMMANDS)
def test_each_has_an_example_of_its_own(name: str) -> None:
    assert any(f"dagrl {name}" in example for example in examples(COMMANDS[name]))


@pytest.mark.parametrize("name", GROUPS)
def test_each_group_has_examples(name: str) -> None:
    assert examples(GROUPS[name])


@pytest.mark.parametrize(
    "example", [each for command in (*COMMANDS.values(), *GROUPS.values()) for each in examples(command)]
)
def test_examples_parse(example: str) -> None:
    words = shlex.split(example)
    words = words[words.index("dagrl") + 1 :]
    callable_alone = COMMANDS | GROUPS
    name = next(name for name in sorted(callable_alone, reverse=True) if words[: len(name.split())] == name.split())
    callable_alone[name].make_context(name, words[len(name.split()) :])


def test_examples_are_printed_one_a_line(capsys) -> None:
    assert main(["run", "--help"]) == 0
    assert (
        "\n  Examples:\n    dagrl run pipeline.yaml\n    dagrl run pipeline.yaml run.steps=60 "
        in capsys.readouterr().out
    )


@pytest.mark.parametrize("name", COMMANDS)
def test_json_is_printed_on_request(name: str) -> None:
    options = {option for parameter in COMMANDS[name].params for option in parameter.opts}
    assert ("--json" in options) is (name not in WITHOUT_JSON)
