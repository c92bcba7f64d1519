"""``timeline.json``: which node ran when and where, as a Chrome trace (chrome://tracing, ui.perfetto.dev).

A JSON array with one event per line, valid after every write, so that it can be opened during the run and after a kill.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterable, Iterator
from itertools import batched
from pathlib import Path
from typing import Any

from dagrl.tracking.base import check_in_place, is_kept, naming, replace_text

_END = b"\n]\n"
_EVENTS_PER_WRITE = 64
"""About ten kilobytes, to limit what a kill can tear."""
Event = dict[str, Any]


class Timeline:
    """Appends events. Groups are processes of the trace, workers are threads.

    Raises OSError that names the file if it cannot be written.
    """

    def __init__(self) -> None:
        self._path = Path()
        self._file: int | None = None
        self._names = _Names()

    def start(self, run_dir: Path, resumed_step: int | None) -> None:
        """Open ``timeline.json`` under `run_dir`; drop events after `resumed_step`, None: all."""
        self._path = run_dir / "timeline.json"
        with naming(self._path):
            run_dir.mkdir(parents=True, exist_ok=True)
            kept = _kept_events(self._path, resumed_step) if self._path.is_file() else []
            replace_text(self._path, self._names.text(kept))
            self._file = os.open(self._path, os.O_RDWR | os.O_CLOEXEC)

    def complete(
        self,
        name: str,
        category: str,
        start_s: float,
        end_s: float,
        *,
        step: int,
        shard: int | None,
        group: str,
        worker: str,
    ) -> None:
        """Record that `worker` of `group` ran `name` from `start_s` to `end_s`, in seconds of one clock."""
        self.extend(
            [complete_event(name, category, start_s, end_s, step=step, shard=shard, group=group, worker=worker)]
        )

    def extend(self, events: Iterable[Event]) -> None:
        """Record several events with few writes: a step may have tens of thousands."""
        for some in batched(events, _EVENTS_PER_WRITE):
            self._append([told for event in some for told in self._names.with_ids(event)])

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _append(self, events: list[Event]) -> None:
        """Overwrite the closing bracket in one system call, so that the file stays valid."""
        assert self._file is not None, "complete before start"
        with naming(self._path):
            check_in_place(self._path, self._file)
            end = os.fstat(self._file).st_size - len(_END)
            separator = b"\n" if end == len(b"[") else b",\n"
            lines = ",\n".join(json.dumps(event) for event in events).encode()
            whole = separator + lines + _END
            written = os.pwrite(self._file, whole, end)
            if written < len(whole):
                # The disk is full: restore the end of the file.
                os.pwrite(self._file, _END, end)
                os.truncate(self._file, end + len(_END))
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class _Names:
    """Processes and threads of the trace so far."""

    def __init__(self) -> None:
        self._groups: dict[str, int] = {}
        self._workers: dict[tuple[str, str], int] = {}

    def with_ids(self, event: Event) -> list[Event]:
        """The event with process and thread ids, preceded by metadata events for new ones."""
        group, worker = event["args"]["group"], event["args"]["worker"]
        events = []
        if group not in self._groups:
            self._groups[group] = len(self._groups) + 1
            events.append(_metadata("process_name", self._groups[group], 0, group))
        pid = self._groups[group]
        if (group, worker) not in self._workers:
            self._workers[group, worker] = len(self._workers) + 1
            events.append(_metadata("thread_name", pid, self._workers[group, worker], worker))
        return [*events, {**event, "pid": pid, "tid": self._workers[group, worker]}]

    def text(self, events: Iterable[Event]) -> str:
        """A whole trace."""
        lines = [json.dumps(told) for event in events for told in self.with_ids(event)]
        return ("[\n" if lines else "[") + ",\n".join(lines) + _END.decode()


def complete_event(
    name: str, category: str, start_s: float, end_s: float, *, step: int, shard: int | None, group: str, worker: str
) -> Event:
    """An event: `worker` of `group` ran `name` from `start_s` to `end_s`."""
    start_us = round(start_s * 1e6)
    return {
        "name": name,
        "cat": category,
        "ph": "X",
        "ts": start_us,
        "dur": round(end_s * 1e6) - start_us,
        "args": {"step": step, "shard": shard, "group": group, "worker": worker},
    }


def write_trace(path: Path, events: Iterable[Event]) -> None:
    """Write complete events as a trace. Raises OSError that names the file if it cannot be written."""
    with naming(path):
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        replace_text(path, _Names().text(events))


def read_events(path: Path) -> list[Event]:
    """The complete events of a run's timeline. Torn or foreign lines are skipped."""
    return list(parse_events(path.read_text(encoding="utf-8", errors="replace").splitlines()))


def parse_events(lines: Iterable[str]) -> Iterator[Event]:
    """The complete events in some lines of a timeline. Torn or foreign lines are skipped."""
    for line in lines:
        try:
            event = json.loads(line.rstrip(","))
        except ValueError:
            continue
        if isinstance(event, dict) and event.get("ph") == "X":
            yield event


def _metadata(name: str, pid: int, tid: int, label: str) -> Event:
    return {"name": name, "ph": "M", "pid": pid, "tid": tid, "args": {"name": label}}


def _kept_events(path: Path, resumed_step: int | None) -> list[Event]:
    """Complete events of a run's steps up to `resumed_step`."""
    ours = [event for event in read_events(path) if _is_of_a_run(event.get("args"))]
    return [event for event in ours if is_kept(event["args"]["step"], resumed_step)]


def _is_of_a_run(said: object) -> bool:
    return isinstance(said, dict) and isinstance(said.get("step"), int) and {"group", "worker"} <= said.keys()
