"""Memory of a process and of all processes below it, over the steps of a run, and which of them grow."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import psutil

MIB = 2**20


@dataclass(frozen=True, slots=True)
class Change:
    """The size of one process at two times, in bytes."""

    name: str
    before: float
    after: float

    @property
    def growth(self) -> float:
        """0.05 stands for 5 %."""
        return self.after / self.before - 1


class ProcessSizes:
    """Samples the sizes of a process, of all processes below it and of Ray's object store.

    A process's size is its anonymous memory: the kernel drops and loads pages of files as it likes. The object store's
    is the shared memory that its file takes. `changes` compares medians over `window` steps, because a process takes
    more in the midst of its work than between two steps.
    """

    def __init__(self, window: int = 100) -> None:
        self._window = window
        self._names: dict[str, str] = {}
        self._samples: dict[str, list[tuple[int, int]]] = {}

    def sample(self, step: int, pid: int, workers: Path) -> None:
        """Measure `pid` and what is below it now. `workers` is the run's workers.json, which names some of them."""
        known = {}
        with suppress(OSError):
            known = {each["pid"]: name for name, each in json.loads(workers.read_text()).items()}
        with suppress(psutil.Error):
            for process in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
                with suppress(psutil.Error, OSError):
                    name = "driver" if process.pid == pid else known.get(process.pid) or process_name(process.cmdline())
                    # Between fork and exec a process is a copy of its parent.
                    key = f"{process.pid} {process.create_time()}"
                    self.add(step, key, f"{name} ({process.pid})", anonymous_bytes(process.pid))
                    if name == "raylet":
                        self.add(step, f"{key} store", "object store", object_store_bytes(process.pid))

    def add(self, step: int, key: str, name: str, nbytes: int) -> None:
        """Keep one sample. The last `name` of a process counts: workers are renamed after their start."""
        self._names[key] = name
        self._samples.setdefault(key, []).append((step, nbytes))

    def changes(self, since: int) -> list[Change]:
        """How each process changed from step `since` to its end; a younger one, from its own first step."""
        return [self._change(key, since) for key in self._samples]

    def _change(self, key: str, since: int) -> Change:
        samples = self._samples[key]
        last = samples[-1][0]
        begin = next((step for step, _ in samples if step >= since), last)
        before = [nbytes for step, nbytes in samples if begin <= step < begin + self._window]
        after = [nbytes for step, nbytes in samples if step > last - self._window]
        # A process that ends before `since` has no later size to compare with.
        return Change(self._names[key], median(before), median(after if last > begin else before))


def process_name(command: Sequence[str]) -> str:
    """What to call a process with this command line: Ray's title, its module, its script or its program."""
    words = " ".join(command).split()
    if not words:
        return "?"
    if words[0].startswith("ray::"):
        return words[0].partition(".")[0]
    if "-m" in words[:-1]:
        return words[words.index("-m") + 1]
    script = next((word for word in words[1:4] if word.endswith(".py")), words[0])
    return Path(script).name


def anonymous_bytes(pid: int) -> int:
    """Memory that the process allocated itself. OSError where it is gone."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise ProcessLookupError(pid)


def object_store_bytes(raylet: int) -> int:
    """Shared memory that the files of a raylet's object store take. OSError where it is gone."""
    total = 0
    for opened in Path(f"/proc/{raylet}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            if str(opened.readlink()).startswith("/dev/shm/"):
                total += opened.stat().st_blocks * 512
    return total


def file_bytes(folder: Path) -> int:
    """What all files below a folder hold, while processes write and remove them."""
    total = 0
    for path in folder.rglob("*"):
        with suppress(OSError):
            total += path.stat().st_size if path.is_file() and not path.is_symlink() else 0
    return total


def table(changes: Sequence[Change], since: int) -> str:
    """The changes, one process a line."""
    width = max((len(each.name) for each in changes), default=0)
    lines = [f"{'process':{width}}   step {since:<5}    the end  change"]
    for each in changes:
        lines.append(
            f"{each.name:{width}} {each.before / MIB:7.1f} MiB {each.after / MIB:6.1f} MiB {each.growth:+7.1%}"
        )
    return "\n".join(lines)
