"""`dagrl run` as a benchmark starts it: a pipeline, a process of its own, and what it leaves in its folder."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]
_SECOND_CALL_S = 1.0
_END_S = 90.0
"""Longest wait for a run that was told to end."""
_SHOWN_LINES = 25


@dataclass(frozen=True, slots=True)
class Event:
    """Something that ran, as timeline.json tells it; times in seconds since the epoch."""

    name: str
    category: str
    start: float
    end: float
    step: int
    worker: str
    """``executor/rank``."""

    @property
    def label(self) -> str:
        """Its name, and of whom where it is something that several engines do."""
        return f"{self.name} {self.worker.partition('/')[0]}" if self.name in ("sleep", "wake", "save") else self.name

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.end - self.start


class DagrlRun:
    """One `dagrl run`, under way or over. Modules beside the benchmarks can be named in its pipeline."""

    def __init__(
        self,
        pipeline: dict[str, Any],
        folder: Path,
        *overrides: str,
        environment: Mapping[str, str] | None = None,
        module: Sequence[str] = ("dagrl",),
    ) -> None:
        """`module`: what stands for the command line, with options of its own."""
        self.folder = folder
        folder.parent.mkdir(parents=True, exist_ok=True)
        file = folder.with_suffix(".yaml")
        file.write_text(yaml.safe_dump(pipeline, sort_keys=False))
        self._log = folder.with_suffix(".log")
        path = [os.environ.get("PYTHONPATH"), str(ROOT), str(ROOT / "benchmarks")]
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", *module, "run", str(file), "--run-dir", str(folder), *overrides],
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=os.environ
                | {"PYTHONPATH": os.pathsep.join(entry for entry in path if entry)}
                | dict(environment or {}),
            )

    @property
    def pid(self) -> int:
        """Its process."""
        return self._process.pid

    @property
    def output(self) -> str:
        """The end of what it has printed."""
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-_SHOWN_LINES:])

    @property
    def over(self) -> bool:
        """Whether its process has ended."""
        return self._process.poll() is not None

    def metrics(self) -> list[dict[str, Any]]:
        """The whole lines of metrics.jsonl."""
        path = self.folder / "metrics.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.is_file() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def events(self) -> list[Event]:
        """What ran, in the order in which it began."""
        path = self.folder / "timeline.json"
        told = json.loads(path.read_text()) if path.is_file() else []
        events = [
            Event(
                each["name"],
                each["cat"],
                each["ts"] / 1e6,
                (each["ts"] + each["dur"]) / 1e6,
                each["args"]["step"],
                each["args"]["worker"],
            )
            for each in told
            if each["ph"] == "X"
        ]
        return sorted(events, key=lambda event: event.start)

    def wait_until(self, reached: Callable[[list[dict[str, Any]]], bool], limit_s: float) -> None:
        """Until the metrics are as wanted, or the run is over. RuntimeError where it failed; TimeoutError."""
        deadline = time.monotonic() + limit_s
        while not reached(self.metrics()):
            if self.over:
                if self._process.returncode != 0:
                    raise RuntimeError(f"dagrl run ended with exit code {self._process.returncode}:\n{self.output}")
                return
            if time.monotonic() > deadline:
                raise TimeoutError(f"dagrl run did not get there within {limit_s:.0f} s:\n{self.output}")
            time.sleep(0.1)

    def wait_for_step(self, step: int, limit_s: float) -> None:
        """Until that step is committed."""
        self.wait_until(lambda metrics: any(line["step"] >= step for line in metrics), limit_s)

    def end(self) -> None:
        """End it now: the first Ctrl-C asks for a checkpoint, the second does not wait for it."""
        for patience in (_SECOND_CALL_S, _END_S):
            if not self.over:
                self._process.send_signal(signal.SIGINT)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(timeout=patience)
        self._process.kill()
        self._process.wait()

    def __enter__(self) -> DagrlRun:
        return self

    def __exit__(self, *exc: object) -> None:
        self.end()


def of_step(events: Iterable[Event], step: int) -> list[Event]:
    """The events of one step."""
    return [event for event in events if event.step == step]


def span(events: Iterable[Event], *names: str) -> tuple[float, float] | None:
    """When the first of these events began and when the last ended; None where there is none."""
    chosen = [event for event in events if event.name in names]
    return (min(event.start for event in chosen), max(event.end for event in chosen)) if chosen else None
