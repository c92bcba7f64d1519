"""`dagrl` called with bounds on time and memory, for files that would use up both."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest


@dataclass(frozen=True)
class Ended:
    """How a call of `dagrl` ended; a negative code is the signal that a bound sent."""

    code: int
    out: str
    err: str


@pytest.fixture(scope="session")
def bounded_dagrl() -> Iterator[Callable[..., Ended]]:
    """Calls `dagrl` within 3 s of CPU time, 30 s of wall time and 1 GiB."""
    command = [sys.executable, str(Path(__file__).with_name("bounded.py"))]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None

        def call(*arguments: str) -> Ended:
            print(json.dumps(arguments), file=process.stdin, flush=True)
            return Ended(**json.loads(process.stdout.readline()))

        yield call
        process.stdin.close()
