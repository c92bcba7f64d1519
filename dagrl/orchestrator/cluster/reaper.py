"""Cleans up after a driver that was killed: a process with a pipe from the driver (see `ray_cluster.py`).

The driver writes the session folder and the ids of Ray's processes to the pipe, and `CLEAN` when it has cleaned up. If
the pipe closes without that, the driver is dead: the processes are killed and the folder is removed. Standard library
only, so that the process is small.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

CLEAN = "clean"
"""The driver's last line if nothing is left to do."""
EPITAPH = "dagrl run: the driver was killed; `dagrl run` with its folder goes on from the last checkpoint"
_LOST = (
    "dagrl run: Ray's {} was killed or ran out of memory (see `dmesg`), and Ray ended the driver; `dagrl run` with its "
    "folder goes on from the last checkpoint"
)
"""Printed instead if a Ray server ended first, because a driver that cannot reach its raylet ends at once."""
_SERVERS = ("gcs_server", "raylet")
_SWEEPS, _MOST_SWEEPS = 5, 50
_SWEEP_S = 0.2


def identity(pid: int) -> str | None:
    """A process's id and start time, which identify it. None if it has ended."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return f"{pid}:{stat.rpartition(')')[2].split()[19]}"


def descendants(pid: int) -> list[int]:
    """All descendants of `pid`; none without /proc."""
    parents: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            parents.setdefault(parent, []).append(int(folder.name))
    below, queue = [], [pid]
    while queue:
        children = parents.get(queue.pop(), [])
        below += children
        queue += children
    return below


def end(identities: list[str]) -> None:
    for process in filter(None, identities):
        pid = int(process.partition(":")[0])
        if identity(pid) == process:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def started_with(word: str) -> list[str]:
    """Identities of the other processes with `word` on their command line."""
    return _others(lambda process: word.encode() in (process / "cmdline").read_bytes())


def writing_in(folder: str) -> list[str]:
    """Identities of the other processes that have a file in `folder` open for writing.

    Ray's processes write logs there. A process that only reads may be a user's, which follows a log or removes the
    folder.
    """
    return _others(lambda process: any(_writes(descriptor, folder) for descriptor in (process / "fd").iterdir()))


def _others(matches: Callable[[Path], bool]) -> list[str]:
    """Identities of the other processes whose folder in /proc matches."""
    identities = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            pid = int(process.name)
            if pid != os.getpid() and matches(process):
                identities.append(identity(pid))
    return [found for found in identities if found]


def _writes(descriptor: Path, folder: str) -> bool:
    """Whether a descriptor, ``/proc/PID/fd/NUMBER``, is a file in `folder` that is open for writing."""
    with contextlib.suppress(OSError):  # closed by now
        if str(descriptor.readlink()).startswith(f"{folder}/"):
            lines = (descriptor.parents[1] / "fdinfo" / descriptor.name).read_text().splitlines()
            flags = next(line.split()[1] for line in lines if line.startswith("flags:"))
            return int(flags, 8) & os.O_ACCMODE != os.O_RDONLY
    return False


def end_all_in(folder: str, processes: list[str]) -> None:
    """Kill the processes and those that write to the folder or name it on their command line, and remove the folder."""
    for sweep in range(_MOST_SWEEPS):
        # Repeat for processes that were just starting, while any write to the folder.
        if sweep >= _SWEEPS and not Path(folder).exists():
            return
        time.sleep(_SWEEP_S if sweep else 0)
        # Processes that Ray started later name the folder on their command line. Its agents rename themselves, and lose
        # their parent if that dies first, but have their logs open.
        known = [*processes, *started_with(folder), *writing_in(folder)]
        # A process id may have been reused since: then its descendants are not Ray's.
        alive = [pid for name in known if identity(pid := int(name.partition(":")[0])) == name]
        children = [identity(child) for pid in alive for child in descendants(pid)]
        end([*known, *filter(None, children)])
        shutil.rmtree(folder, ignore_errors=True)


def _listen() -> tuple[list[str], str]:
    """Lines of the driver until the pipe closes, and the server of Ray that ended before that, if any."""
    text, lost, names = b"", "", dict[int, str]()
    poll = select.poll()
    poll.register(0, select.POLLIN)
    while True:
        ready = {descriptor for descriptor, _ in poll.poll()}
        for ended in ready - {0}:
            poll.unregister(ended)
            # Ray's servers end with the driver, too: the kernel kills them.
            lost = lost or ("" if 0 in ready else names[ended])
        if 0 in ready:
            known, read = text.count(b"\n"), os.read(0, 2**16)
            if not read:
                return [line.strip() for line in text.decode().splitlines()], lost
            text += read
            for line in text.decode().splitlines()[max(known, 1) : text.count(b"\n")]:
                with contextlib.suppress(OSError, ValueError):  # it has ended, or is not a process
                    pid = int(line.partition(":")[0])
                    name = Path(f"/proc/{pid}/comm").read_text().strip()
                    if name in _SERVERS and name not in names.values():
                        descriptor = os.pidfd_open(pid)
                        names[descriptor] = name
                        poll.register(descriptor, select.POLLIN)


def main() -> None:
    """Read the folder and the processes until the pipe closes; clean up unless the driver has."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    lines, lost = _listen()
    if not lines or lines[-1] == CLEAN:
        return
    folder, *processes = lines
    epitaph = _LOST.format(lost) if lost else sys.argv[1] if len(sys.argv) > 1 else EPITAPH
    with contextlib.suppress(OSError):
        print(epitaph, file=sys.stderr, flush=True)
    end_all_in(folder, processes)


if __name__ == "__main__":
    main()
