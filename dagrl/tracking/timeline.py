"""``timeline.json``: which node ran when and where, as a Chrome trace (chrome://tracing, ui.perfetto.dev).

A JSON array with one event per line, valid after every write, so that it can be opened during the run and after a kill.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import batched
from pathlib import Path
from typing import Any

from dagrl.scheduler.intervals import Activity
from dagrl.scheduler.plan import WorkerId
from dagrl.tracking.base import check_in_place, is_kept, naming, replace_text

_END = b"\n]\n"
_EVENTS_PER_WRITE = 64
"""About ten kilobytes, so that a kill tears little."""
Event = dict[str, Any]


class Timeline:
    """Appends activities as events. Groups are processes of the trace, workers are threads.

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
            kept = _kept_activities(self._path, resumed_step) if self._path.is_file() else ()
            replace_text(self._path, self._names.text(kept))
            self._file = os.open(self._path, os.O_RDWR | os.O_CLOEXEC)

    def extend(self, activities: Iterable[Activity]) -> None:
        for some in batched(activities, _EVENTS_PER_WRITE):
            self._append([event for activity in some for event in self._names.events(activity)])

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _append(self, events: list[Event]) -> None:
        """Overwrite the closing bracket in one system call, so that the file stays valid."""
        assert self._file is not None, "extend before start"
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

    def events(self, activity: Activity) -> list[Event]:
        """The event of an activity, preceded by metadata events for a new group or worker."""
        group, worker = activity.group, str(activity.worker)
        events = []
        if group not in self._groups:
            self._groups[group] = len(self._groups) + 1
            events.append(_metadata("process_name", self._groups[group], 0, group))
        pid = self._groups[group]
        if (group, worker) not in self._workers:
            self._workers[group, worker] = len(self._workers) + 1
            events.append(_metadata("thread_name", pid, self._workers[group, worker], worker))
        start_us = round(activity.start * 1e6)
        event = {
            "name": activity.name,
            "cat": activity.category,
            "ph": "X",
            "ts": start_us,
            "dur": round(activity.end * 1e6) - start_us,
            "args": {"step": activity.step, "shard": activity.shard, "group": group, "worker": worker},
            "pid": pid,
            "tid": self._workers[group, worker],
        }
        return [*events, event]

    def text(self, activities: Iterable[Activity]) -> str:
        lines = [json.dumps(event) for activity in activities for event in self.events(activity)]
        return ("[\n" if lines else "[") + ",\n".join(lines) + _END.decode()


def write_trace(path: Path, activities: Iterable[Activity]) -> None:
    """Write activities as a trace. Raises OSError that names the file if it cannot be written."""
    with naming(path):
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        replace_text(path, _Names().text(activities))


def parse_activities(lines: Iterable[str], path: Path) -> list[Activity]:
    """The activities in some lines of a timeline. Torn or foreign lines are skipped.

    Raises ValueError, which names `path`, if an event is of another program.
    """
    try:
        return [_activity(event) for event in _complete_events(lines)]
    except KeyError as error:
        raise ValueError(f"{path} is not a run's timeline: an event lacks {error}") from error
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path} is not a run's timeline: an event has an unexpected value ({error})") from error


def _complete_events(lines: Iterable[str]) -> Iterator[Event]:
    for line in lines:
        try:
            event = json.loads(line.rstrip(","))
        except ValueError:
            continue
        if isinstance(event, dict) and event.get("ph") == "X":
            yield event


def _activity(event: Event) -> Activity:
    """The activity of an event. Raises KeyError, TypeError or ValueError if it is of another program."""
    return Activity(
        str(event["name"]),
        str(event["cat"]),
        event["ts"] / 1e6,
        (event["ts"] + event["dur"]) / 1e6,
        int(event["args"]["step"]),
        event["args"]["shard"],
        str(event["args"]["group"]),
        WorkerId.parse(str(event["args"]["worker"])),
    )


def _metadata(name: str, pid: int, tid: int, label: str) -> Event:
    return {"name": name, "ph": "M", "pid": pid, "tid": tid, "args": {"name": label}}


def _kept_activities(path: Path, resumed_step: int | None) -> Iterator[Activity]:
    """The activities of a run's steps up to `resumed_step`. Events of other programs are dropped."""
    for event in _complete_events(path.read_text(encoding="utf-8", errors="replace").splitlines()):
        with suppress(KeyError, TypeError, ValueError):
            activity = _activity(event)
            if is_kept(activity.step, resumed_step):
                yield activity
