"""CPU time of a command and of every process that comes of it, daemons included, by process.

    python benchmarks/cpu_seconds.py dagrl run dag_templates/tiny_grpo.yaml run.steps=3

Unlike `time`, it counts processes without a parent that waits for them, such as Ray's daemons.
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
import time

import psutil

_PR_SET_CHILD_SUBREAPER = 36
_PAUSE_S = 0.05


def main() -> int:
    """Run the command; its exit code. Writes to stderr, so that it may print."""
    # Processes whose parents end become our children, and are not lost.
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    began = time.monotonic()
    command = subprocess.Popen(sys.argv[1:])
    seen: dict[psutil.Process, tuple[float, str]] = {}
    quiet = 0
    # Twice: a process whose parent ends just now is in neither's place.
    while quiet < 2:
        time.sleep(_PAUSE_S)
        quiet = 0 if note(seen) or command.poll() is None else quiet + 1
    for seconds, name in sorted(seen.values(), reverse=True):
        print(f"{seconds:8.2f}  {name[:110]}", file=sys.stderr)
    total = sum(seconds for seconds, _ in seen.values())
    print(f"{total:8.2f}  CPU seconds in {time.monotonic() - began:.1f} s", file=sys.stderr)
    return command.returncode


def note(seen: dict[psutil.Process, tuple[float, str]]) -> bool:
    """Put down what each descendant has used so far, user and system, and its newest name; whether any still runs."""
    runs = False
    for process in psutil.Process().children(recursive=True):
        try:
            with process.oneshot():
                times, line = process.cpu_times(), " ".join(process.cmdline())
                runs |= process.status() != psutil.STATUS_ZOMBIE
        except psutil.Error:
            continue
        seen[process] = times.user + times.system, line or seen.get(process, (0.0, process.name()))[1]
    return runs


if __name__ == "__main__":
    sys.exit(main())
