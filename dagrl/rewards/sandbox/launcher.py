"""Entry point of the sandboxed process: drops its privileges, then executes Python with the code.

The runner starts this file with ``python -I -S``. It imports only the standard library, so it starts fast and runs no
third-party module before the restrictions apply. Its one argument is JSON; see `dagrl.rewards.sandbox.runner`.
"""

import ctypes
import json
import os
import resource
import signal
import struct
import sys
from typing import Any

READY = b"ready"
"""Sent through the status pipe once all restrictions apply."""

_LIBC = ctypes.CDLL(None, use_errno=True)

_PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 22, 38
_SECCOMP_MODE_FILTER = 2
_SYS_CAPSET = {"x86_64": 126, "aarch64": 91}
_SYS_EXEC = {"x86_64": (59, 322), "aarch64": (221, 281)}
"""`execve` and `execveat`."""
_NUMBER_OFFSET, _ARGUMENT_OFFSET = 0, 16
"""Offsets of a call's number and first argument in the data of a seccomp filter."""
_ALLOW, _REFUSE = 0x7FFF0000, 0x00050000 | 1
"""Answers of a filter; the second one is EPERM."""
_CAPABILITY_VERSION_3 = 0x20080522

# The same on all machines.
_SYS_LANDLOCK_CREATE, _SYS_LANDLOCK_ADD_RULE, _SYS_LANDLOCK_RESTRICT = 444, 445, 446
_LANDLOCK_VERSION_FLAG = 1
_LANDLOCK_PATH_BENEATH = 1
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR, _REMOVE_FILE, _MAKE_REGULAR = (1 << bit for bit in (0, 1, 2, 3, 5, 8))
_TRUNCATE = 1 << 14
_FOLDERS_ONLY = _READ_DIR | _REMOVE_FILE | _MAKE_REGULAR
# The number of file rights that each Landlock version knows, starting at version 1: the rights below this bit.
_RIGHTS_BITS = (13, 14, 15, 15, 16)
_KNOWS_TCP, _LANDLOCK_NET_PORT, _TCP_CONNECT = 4, 2, 2
_TCP_BIND_AND_CONNECT, _ABSTRACT_SOCKETS_AND_SIGNALS = 3, 3


def main() -> None:
    """Restrict this process, then execute the program. Errors are sent through the pipe ``status_fd``."""
    order = json.loads(sys.argv[1])
    os.set_inheritable(order["status_fd"], False)
    try:
        program = ctypes.create_string_buffer(os.fsencode(order["command"][0]))
        confine(order, program)
        os.write(order["status_fd"], READY)
        _execute(program, order["command"], order["environment"])
    except OSError as error:
        os.write(order["status_fd"], (error.strerror or str(error)).encode())
        os._exit(1)


def _execute(program: object, command: list[str], environment: dict[str, str]) -> None:
    """Execute `command`, whose program is named by the memory at `program`."""
    arguments = [os.fsencode(argument) for argument in command]
    variables = [os.fsencode(f"{name}={value}") for name, value in environment.items()]
    _LIBC.execve(program, _pointers(arguments), _pointers(variables))
    _check(-1, "cannot start the program")


def _pointers(texts: list[bytes]) -> object:
    return (ctypes.c_char_p * (len(texts) + 1))(*texts, None)


def confine(order: dict[str, Any], program: Any = None) -> None:
    """Apply all restrictions. Raises OSError with an explanation if the kernel does not support one.

    `program` is the memory with the name of the only program that it may execute, if the order has ``forks``.
    """
    _check(_LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "cannot tie the process to its parent")
    if os.getppid() != order["parent"]:
        os._exit(1)
    for name, value in order["limits"].items():
        kind = getattr(resource, name)
        hard = resource.getrlimit(kind)[1]
        bound = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (bound, bound))
    _drop_capabilities()
    _check(_LIBC.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "the kernel has no no_new_privs")
    if order["readable"] is not None:
        _hide_files(
            order["readable"], order.get("visible", []), order["writable"], order["port"], order.get("owned", [])
        )
    if order["forks"]:
        _filter_calls(_only_program(ctypes.addressof(program)))
    _filter_calls(bytes.fromhex(order["filter"]))


def _only_program(address: int) -> bytes:
    """A filter that refuses to execute any program but the one whose name lies at this address.

    The memory is gone once that program runs, so it can execute no other.
    """
    execve, execveat = _SYS_EXEC[os.uname().machine]
    load, jump_if_equal, answer = 0x20, 0x15, 0x06
    instructions = (
        (load, 0, 0, _NUMBER_OFFSET),
        (jump_if_equal, 6, 0, execveat),
        (jump_if_equal, 0, 4, execve),
        (load, 0, 0, _ARGUMENT_OFFSET),
        (jump_if_equal, 0, 3, address & 0xFFFFFFFF),
        (load, 0, 0, _ARGUMENT_OFFSET + 4),
        (jump_if_equal, 0, 1, address >> 32),
        (answer, 0, 0, _ALLOW),
        (answer, 0, 0, _REFUSE),
    )
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in instructions)


def _drop_capabilities() -> None:
    """Drop all capabilities. With no_new_privs, no program that the process executes can regain them."""
    header = struct.pack("=Ii", _CAPABILITY_VERSION_3, 0)
    _check(_LIBC.syscall(_SYS_CAPSET[os.uname().machine], header, bytes(24)), "cannot drop capabilities")


def _hide_files(
    readable: list[str], visible: list[str], writable: list[str], port: int | None, owned: list[str]
) -> None:
    """Allow access to these paths only, and TCP connections to `port` only, if it is given.

    Readable files can be executed, visible ones only read. In writable folders, the process can create files, but no
    folders or links. In owned folders, it can do everything.
    """
    version = _LIBC.syscall(_SYS_LANDLOCK_CREATE, None, ctypes.c_size_t(0), _LANDLOCK_VERSION_FLAG)
    _check(version, "the kernel has no Landlock, which hides the user's files; `hide_files: false` does without")
    known = (1 << _RIGHTS_BITS[min(version, len(_RIGHTS_BITS)) - 1]) - 1
    wanted = [known, *([_TCP_BIND_AND_CONNECT] if version >= _KNOWS_TCP else [])]
    wanted += [_ABSTRACT_SOCKETS_AND_SIGNALS] if version >= 6 else []
    rules = struct.pack(f"={len(wanted)}Q", *wanted)
    ruleset = _LIBC.syscall(_SYS_LANDLOCK_CREATE, rules, ctypes.c_size_t(len(rules)), 0)
    _check(ruleset, "cannot make rules for Landlock")
    reads = _EXECUTE | _READ_FILE | _READ_DIR
    writes = _READ_FILE | _READ_DIR | _WRITE_FILE | _TRUNCATE | _REMOVE_FILE | _MAKE_REGULAR
    for paths, rights in ((readable, reads), (visible, reads & ~_EXECUTE), (writable, writes), (owned, known)):
        for path in paths:
            _allow(ruleset, path, rights & known)
    if port is not None:
        if version < _KNOWS_TCP:
            raise OSError("the kernel's Landlock cannot limit connections to one port; it needs Linux 6.7")
        rule = struct.pack("=QQ", _TCP_CONNECT, port)
        added = _LIBC.syscall(_SYS_LANDLOCK_ADD_RULE, ruleset, _LANDLOCK_NET_PORT, rule, 0)
        _check(added, f"cannot allow connections to port {port}")
    _check(_LIBC.syscall(_SYS_LANDLOCK_RESTRICT, ruleset, 0), "cannot begin to hide files")
    os.close(ruleset)


def _allow(ruleset: int, path: str, rights: int) -> None:
    try:
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    if not os.path.isdir(path):  # noqa: PTH112 - pathlib takes longer to import than all of this
        rights &= ~_FOLDERS_ONLY
    rule = struct.pack("=Qi", rights, place)
    _check(_LIBC.syscall(_SYS_LANDLOCK_ADD_RULE, ruleset, _LANDLOCK_PATH_BENEATH, rule, 0), f"cannot allow {path}")
    os.close(place)


def _filter_calls(program: bytes) -> None:
    held = ctypes.create_string_buffer(program)
    described = struct.pack("@HP", len(program) // 8, ctypes.addressof(held))
    _check(
        _LIBC.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, described, 0, 0),
        "the kernel has no seccomp filters, which keep the process off the network",
    )


def _check(returned: int, what: str) -> None:
    if returned < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{what} ({os.strerror(error)})")


if __name__ == "__main__":
    main()
