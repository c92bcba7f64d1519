"""Asks the Python in which an agent runs: whether it can run there, and which tasks an environment has."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from dagrl.config.errors import in_one_line
from dagrl.environments import foreign
from dagrl.plugins.agent import NamedAgent

_CHECK_S = 60.0
_SHOWN_CHARACTERS = 300


def problem_in(python: Path, agent: NamedAgent) -> tuple[str | None, str] | None:
    """`NamedAgent.problem` in another Python."""
    try:
        with answers(python, agent, "problem", _CHECK_S) as lines:
            found = json.loads(next(lines, "null"))
    except ValueError as error:
        return "python", str(error)
    return None if found is None else (found[0], found[1])


@contextmanager
def answers(python: Path | None, agent: NamedAgent, question: str, seconds: float) -> Iterator[Iterator[str]]:
    """The lines, in JSON, that answer ``problem`` or ``rows``.

    Raises ValueError, in one sentence, if there is no such Python, or it fails or takes longer than `seconds`.
    """
    if python is not None and not python.is_file():
        is_folder = (
            f"is a folder; name its Python, such as {python}/bin/python"
            if python.is_dir()
            else "does not exist; name a Python of 3.12 or newer"
        )
        raise ValueError(f"{python} {is_folder}")
    with tempfile.TemporaryFile("w+") as answer, tempfile.TemporaryFile("w+") as said:
        try:
            process = subprocess.Popen(
                foreign.command(python, __name__, question, answer.fileno()),
                stdin=subprocess.PIPE,
                stdout=said,
                stderr=said,
                pass_fds=[answer.fileno()],
                env=foreign.variables(python),
                start_new_session=True,
                text=True,
            )
        except OSError as error:
            raise ValueError(f"{python} cannot be started: {error.strerror}") from error
        try:
            process.communicate(json.dumps(agent.as_values()), timeout=seconds)
        except subprocess.TimeoutExpired as error:
            raise ValueError(f"{agent.name} took longer than {seconds:g} s; do such work in `solve`") from error
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if process.returncode:
            why = f"{python or sys.executable} cannot run {agent.name}: {_last_line(said)}"
            raise ValueError(f"{why}; correct it, or name another `python`")
        answer.seek(0)
        yield iter(answer)


def _last_line(said: IO[str]) -> str:
    said.seek(0)
    text = said.read().strip()
    if "SyntaxError" in text or "option -P" in text:
        return "it needs Python 3.12 or newer"
    return in_one_line(text.rpartition("\n")[2][:_SHOWN_CHARACTERS]) or "it says nothing"


def main(question: str, descriptor: str) -> None:
    """In the other Python: answer a question about the agent that standard input names."""
    agent = NamedAgent(**json.load(sys.stdin))
    agent.make_importable()
    with os.fdopen(int(descriptor), "w") as answer:
        if question == "problem":
            print(json.dumps(agent.problem()), file=answer)
            return
        made: Any = agent.load()
        for row in made(**agent.args).rows():
            print(json.dumps(row), file=answer)
