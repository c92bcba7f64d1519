"""The first process of a local sandbox: starts its commands, and kills all that is left when owner or time end.

``python -I -S local_init.py JSON`` with a socket to the owner. It receives commands as lines of JSON, and answers each
with ``[number, status]``. Imports the standard library only, so that it starts fast and stays small.
"""

import ctypes
import importlib
import json
import os
import resource
import select
import signal
import socket
import sys
import time
from contextlib import suppress
from typing import Any

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
NOT_CONFINED = 126
"""Exit status of a command that this machine cannot run as ordered; the reason is in the file `FAILED`."""
FAILED = "failed"


def main(order: dict[str, Any]) -> None:
    """Serve the owner until it closes the socket, or until the sandbox's time ends."""
    # Processes whose parents end become children of this one.
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    woken, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    owner = socket.socket(fileno=order["socket"])
    os.set_inheritable(order["socket"], False)
    sys.path.insert(0, order["launchers"])
    launcher = importlib.import_module("launcher")
    if order["cpus"]:
        os.sched_setaffinity(0, order["cpus"])
    owner.sendall(b"[0, 0]\n")
    running: dict[int, int] = {}
    received = b""
    end = time.monotonic() + order["lifetime_s"]
    while (left := end - time.monotonic()) > 0:
        ready, _, _ = select.select([owner.fileno(), woken], [], [], left)
        if woken in ready:
            os.read(woken, 4096)
            for pid, status in _reaped():
                if pid in running:
                    owner.sendall(f"[{running.pop(pid)}, {status}]\n".encode())
        if owner.fileno() in ready:
            if not (more := owner.recv(1 << 16)):
                return
            *lines, received = (received + more).split(b"\n")
            for line in lines:
                number, command = json.loads(line)
                if command is not None:
                    running[_started(launcher, order, command)] = number
                for pid in [pid for pid, of in running.items() if of == number and command is None]:
                    os.killpg(pid, signal.SIGKILL)


def _started(launcher: Any, order: dict[str, Any], command: dict[str, Any]) -> int:
    """Start a command in its own process group, and return its process id."""
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    try:
        # Python ignores the other two, and programs inherit that.
        for number in (signal.SIGCHLD, signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        os.setpgid(0, 0)
        for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
            opened = os.open(command[name], os.O_RDONLY if not descriptor else os.O_WRONLY | os.O_CREAT, 0o600)
            os.dup2(opened, descriptor)
        if problem := _changed_folder(command["cwd"]):
            os.write(2, problem)
            os._exit(125)
        try:
            if order["confined"]:
                launcher.confine({**order["confined"], "parent": parent})
            else:
                ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
                for name, value in order["limits"].items():
                    resource.setrlimit(getattr(resource, name), (value, value))
        except (OSError, ValueError) as error:
            with open(f"{command['stdout']}.{FAILED}", "w") as file:  # noqa: PTH123 - pathlib takes longer to import
                file.write(str(error))
            os._exit(NOT_CONFINED)
        try:
            os.execvpe(command["command"][0], command["command"], command["env"])
        except OSError as error:
            os.write(2, f"{command['command'][0]}: {error.strerror}\n".encode())
            os._exit(127)
    finally:
        os._exit(NOT_CONFINED)


def _changed_folder(folder: str) -> bytes | None:
    try:
        os.chdir(folder)
    except OSError as error:
        return f"cd: {folder}: {error.strerror}\n".encode()
    return None


def _reaped() -> list[tuple[int, int]]:
    """Processes that have ended, with their exit codes; 128 + N after the signal N."""
    ended = []
    with suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            code = os.waitstatus_to_exitcode(found[1])
            ended.append((found[0], code if code >= 0 else 128 - code))
    return ended


def _kill_all() -> None:
    """Kill all descendants: those of killed processes become children of this one."""
    while True:
        for pid in _children():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def _children() -> list[int]:
    own, found = str(os.getpid()), []
    for entry in os.listdir("/proc"):  # noqa: PTH208
        if entry.isdigit():
            with suppress(OSError), open(f"/proc/{entry}/stat") as file:  # noqa: PTH123
                if file.read().rpartition(")")[2].split()[1] == own:
                    found.append(int(entry))
    return found


if __name__ == "__main__":
    order = json.loads(sys.argv[1])
    try:
        # An owner that is gone reads no answers.
        with suppress(OSError):
            main(order)
    finally:
        signal.set_wakeup_fd(-1)
        _kill_all()
        os.execv("/bin/rm", ["rm", "-rf", order["folder"]])
