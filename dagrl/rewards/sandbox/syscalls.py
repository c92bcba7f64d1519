"""Builds the seccomp filter that restricts the system calls of the sandboxed process.

Landlock (`dagrl.rewards.sandbox.launcher`) restricts the files that the process can open, and resource limits restrict
how much it uses. The filter blocks the rest: network, new processes, signals to other processes, and file operations
that Landlock does not check, such as changing a file's mode.
"""

from __future__ import annotations

import errno
import os
import struct
from dataclasses import dataclass

type Numbers = tuple[int | None, int | None]

FORBIDDEN: dict[str, Numbers] = {
    # Network. `socketpair` stays available for streams: asyncio needs it, and it reaches no other process.
    "socket": (41, 198), "connect": (42, 203), "bind": (49, 200), "listen": (50, 201), "accept": (43, 202),
    "accept4": (288, 242),
    # A file descriptor in flight over a socket pair keeps a file on the disk that the parent cannot see.
    "sendmsg": (46, 211), "sendmmsg": (307, 269),
    # Processes. Threads use `clone`, so the filter checks its arguments instead.
    "fork": (57, None), "vfork": (58, None),
    # Other processes of the same user.
    "kill": (62, 129), "tkill": (200, 130), "tgkill": (234, 131), "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240), "ptrace": (101, 117), "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271), "kcmp": (312, 272), "setpriority": (141, 140), "ioprio_set": (251, 30),
    "sched_setaffinity": (203, 122), "sched_setscheduler": (144, 119), "sched_setparam": (142, 118),
    "sched_setattr": (314, 274), "migrate_pages": (256, 238), "move_pages": (279, 239),
    # Objects that outlive the process, or that its memory limit does not count.
    "shmget": (29, 194), "semget": (64, 190), "msgget": (68, 186), "mq_open": (240, 180), "mq_unlink": (241, 181),
    "memfd_create": (319, 279),
    # Resources with a quota that all processes of the user or the machine share.
    "io_setup": (206, 0), "timer_create": (222, 107),
    # File operations that Landlock does not check.
    "chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53), "chown": (92, None), "fchown": (93, 55),
    "lchown": (94, None), "fchownat": (260, 54), "setxattr": (188, 5), "lsetxattr": (189, 6), "fsetxattr": (190, 7),
    "removexattr": (197, 14), "lremovexattr": (198, 15), "fremovexattr": (199, 16), "utime": (132, None),
    "utimes": (235, None), "futimesat": (261, None), "utimensat": (280, 88), "truncate": (76, 45),
    "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265), "fanotify_init": (300, 262),
    "inotify_init": (253, None), "inotify_init1": (294, 26), "inotify_add_watch": (254, 27), "flock": (73, 32),
    # Ways around the file limits: space allocated past a file's end, and links.
    "fallocate": (285, 47), "link": (86, None), "linkat": (265, 37), "symlink": (88, None), "symlinkat": (266, 36),
    # The machine.
    "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51), "unshare": (272, 97),
    "setns": (308, 268), "init_module": (175, 105), "finit_module": (313, 273), "delete_module": (176, 106),
    "kexec_load": (246, 104), "kexec_file_load": (320, 294), "bpf": (321, 280), "perf_event_open": (298, 241),
    "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219), "userfaultfd": (323, 282),
    "reboot": (169, 142), "swapon": (167, 224), "swapoff": (168, 225), "acct": (163, 89), "quotactl": (179, 60),
    "settimeofday": (164, 170), "clock_settime": (227, 112), "clock_adjtime": (305, 266), "adjtimex": (159, 171),
    "sethostname": (170, 161), "setdomainname": (171, 162), "ioperm": (173, None), "iopl": (172, None),
    "vhangup": (153, 58), "syslog": (103, 116), "personality": (135, 92), "sync": (162, 81), "syncfs": (306, 267),
}  # fmt: skip
CHANGES_NAMES: dict[str, Numbers] = {
    "creat": (85, None), "rename": (82, None), "renameat": (264, 38), "renameat2": (316, 276), "mkdir": (83, None),
    "mkdirat": (258, 34), "rmdir": (84, None), "unlink": (87, None), "unlinkat": (263, 35), "mknod": (133, None),
    "mknodat": (259, 33),
}  # fmt: skip
"""Calls that create, rename and remove files. Forbidden without Landlock, which otherwise restricts the folder."""
CHANGES_GROUPS: dict[str, Numbers] = {"setpgid": (109, 154), "setsid": (112, 157)}
"""Calls that leave a process group. Forbidden to processes with children: the group is killed at the end."""
_OF_PROGRAMS = ("fork", "vfork", "symlink", "symlinkat")
"""Forbidden calls that programs need. Landlock restricts the links."""


_FIRST_COMMON = 424
"""System calls from this number on have the same number on all machines."""
_CLOSE_RANGE = 436
_NEW_AND_HARMLESS = {"faccessat2": 439, "epoll_pwait2": 441, "futex_waitv": 449}
"""Allowed calls from `_FIRST_COMMON` on, besides `_CLOSE_RANGE`. All others return ENOSYS, including calls of future
kernels. Python and the C library do not need them: ``clone3`` falls back to ``clone``, whose arguments the filter can
check, and ``io_uring`` is not used."""

_KILL, _ERRNO, _ALLOW = 0x80000000, 0x00050000, 0x7FFF0000
_LOAD, _AND, _RETURN = 0x20, 0x54, 0x06
_JUMP_EQUAL, _JUMP_AT_LEAST, _JUMP_ANY_BIT = 0x15, 0x35, 0x45
_NUMBER_AT, _ARCHITECTURE_AT, _ARGUMENTS_AT = 0, 4, 16
_X32_NUMBERS = 0x40000000

_CLONE_THREAD, _CLONE_FILES, _CLOSE_RANGE_UNSHARE = 0x10000, 0x400, 2
_CLONE_NEW, _CLONE_PARENT = 0x7E020000, 0x8000
"""Flags of namespaces, and of a process whose parent is that of the caller."""
_AF_UNIX, _AF_INET, _SOCK_STREAM, _SOCK_KINDS = 1, 2, 1, 0xF
_F_SETOWN, _F_SETOWN_EX, _F_SETLEASE, _F_NOTIFY, _F_SETPIPE_SZ = 8, 15, 1024, 1026, 1031
_TCGETS, _TIOCGWINSZ, _FIONREAD, _FIONBIO, _FIONCLEX, _FIOCLEX = 0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE = 1, 4

type _Code = list[tuple[int, int, int, int]]
"""Instructions: operation, number of instructions to skip if true and if false, operand."""


@dataclass(frozen=True, slots=True)
class _Machine:
    """Numbers that differ between machines."""

    place: int
    """Index into the tables of numbers."""
    architecture: int
    clone: int
    open: int | None
    openat: int
    socketpair: int
    fcntl: int
    ioctl: int
    prctl: int
    prlimit64: int


_MACHINES = {
    "x86_64": _Machine(
        0, 0xC000003E, clone=56, open=2, openat=257, socketpair=53, fcntl=72, ioctl=16, prctl=157, prlimit64=302
    ),
    "aarch64": _Machine(
        1, 0xC00000B7, clone=220, open=None, openat=56, socketpair=199, fcntl=25, ioctl=29, prctl=167, prlimit64=261
    ),
}


def filter_program(
    machine: str, *, write_files: bool, connects: bool = False, forks: bool = False, programs: bool = False
) -> bytes:
    """The filter for a `machine`, as ``platform.machine()`` names it: an array of ``struct sock_filter``.

    Without `write_files`, no file can be opened for writing, created or removed. With `connects`, TCP connections can
    be opened, to ports that Landlock allows. With `forks`, it can start processes in its own process group; with
    `programs`, these may be any that Landlock allows.
    Raises OSError for an unknown machine.
    """
    if machine not in _MACHINES:
        raise OSError(f"the sandbox knows the system calls of {' and '.join(_MACHINES)}, not of {machine}")
    known = _MACHINES[machine]
    code = [*_load(_ARCHITECTURE_AT), (_JUMP_EQUAL, 1, 0, known.architecture), *_return(_KILL), *_load(_NUMBER_AT)]
    # The x32 ABI has the same calls under other numbers.
    code += _when(_JUMP_AT_LEAST, _X32_NUMBERS, _return(_KILL))
    if connects:
        (place, rule) = (
            FORBIDDEN["socket"][known.place],
            _only_streams(_AF_INET),
        )  # TCP, whose connections Landlock checks
        assert place is not None
        code += _when(_JUMP_EQUAL, place, [*_load(_ARGUMENTS_AT), *rule])
    forbidden = FORBIDDEN | ({} if write_files else CHANGES_NAMES) | (CHANGES_GROUPS if forks else {})
    for name, numbers in forbidden.items():
        number = numbers[known.place]
        allowed = (connects and name in ("socket", "connect")) or (programs and name in _OF_PROGRAMS)
        if number is not None and not allowed:
            code += _when(_JUMP_EQUAL, number, _refuse(errno.EPERM))
    for number, argument, rule in _by_argument(known, write_files, forks):
        code += _when(_JUMP_EQUAL, number, [*_load(_ARGUMENTS_AT + 8 * argument), *rule])
    for number in _NEW_AND_HARMLESS.values():
        code += _when(_JUMP_EQUAL, number, _return(_ALLOW))
    code += _when(_JUMP_AT_LEAST, _FIRST_COMMON, _refuse(errno.ENOSYS))
    code += _return(_ALLOW)
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in code)


def _by_argument(machine: _Machine, write_files: bool, forks: bool) -> list[tuple[int, int, _Code]]:
    """Calls that are filtered by one of their arguments: number, index of the argument, rule for its value."""
    opening = _never_cut_short() if write_files else _unless_any_bit(_WRITING, errno.EACCES)
    # Only threads that share their open files, because the runner inspects only one thread.
    threads = _only_if_all_bits(_CLONE_THREAD | _CLONE_FILES)
    creating = _unless_any_bit(_CLONE_NEW | _CLONE_PARENT, errno.EPERM) if forks else threads
    rules = [
        (machine.clone, 0, creating),
        (_CLOSE_RANGE, 2, _unless_any_bit(_CLOSE_RANGE_UNSHARE, errno.EPERM)),
        (machine.openat, 2, opening),
        (machine.socketpair, 0, _only_streams(_AF_UNIX)),
        # Signals of a file or socket can go to any process of the same user. Leases block other processes, and
        # directory notifications report their changes. The size of pipes counts against a quota of the user.
        (machine.fcntl, 1, _unless_one_of(_F_SETOWN, _F_SETOWN_EX, _F_SETLEASE, _F_NOTIFY, _F_SETPIPE_SZ)),
        # The requests that Python makes. Others do the same as `fcntl`, or are specific to a file system.
        (machine.ioctl, 1, _only_one_of(_TCGETS, _TIOCGWINSZ, _FIONREAD, _FIONBIO, _FIONCLEX, _FIOCLEX)),
        # The process must die with its parent, and the parent must be able to see its open files.
        (machine.prctl, 0, _unless_one_of(_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE)),
        # Only its own limits, which it can only lower.
        (machine.prlimit64, 0, [(_JUMP_EQUAL, 0, 1, 0), *_return(_ALLOW), *_refuse(errno.EPERM)]),
    ]
    return rules if machine.open is None else [*rules, (machine.open, 1, opening)]


_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


def _never_cut_short() -> _Code:
    """Refuse to open a file for reading and truncate it, which Landlock allows before version 3."""
    checks = [(_AND, 0, 0, os.O_ACCMODE | os.O_TRUNC), *_when(_JUMP_EQUAL, os.O_TRUNC, _refuse(errno.EACCES))]
    return [*checks, *_return(_ALLOW)]


def _only_streams(family: int) -> _Code:
    """Allow stream sockets of a family only: a datagram socket could send to any other socket that has a name."""
    kind = [*_load(_ARGUMENTS_AT + 8), (_AND, 0, 0, _SOCK_KINDS), *_when(_JUMP_EQUAL, _SOCK_STREAM, _return(_ALLOW))]
    return [*_when(_JUMP_EQUAL, family, [*kind, *_refuse(errno.EPERM)]), *_refuse(errno.EPERM)]


def _unless_one_of(*values: int) -> _Code:
    refused = [_when(_JUMP_EQUAL, value, _refuse(errno.EPERM)) for value in values]
    return [*(instruction for code in refused for instruction in code), *_return(_ALLOW)]


def _only_one_of(*values: int) -> _Code:
    allowed = [_when(_JUMP_EQUAL, value, _return(_ALLOW)) for value in values]
    return [*(instruction for code in allowed for instruction in code), *_refuse(errno.EPERM)]


def _unless_any_bit(bits: int, error: int) -> _Code:
    return [*_when(_JUMP_ANY_BIT, bits, _refuse(error)), *_return(_ALLOW)]


def _only_if_all_bits(bits: int) -> _Code:
    return [(_AND, 0, 0, bits), *_when(_JUMP_EQUAL, bits, _return(_ALLOW)), *_refuse(errno.EPERM)]


def _when(condition: int, value: int, body: _Code) -> _Code:
    return [(condition, 0, len(body), value), *body]


def _load(offset: int) -> _Code:
    return [(_LOAD, 0, 0, offset)]


def _return(what: int) -> _Code:
    return [(_RETURN, 0, 0, what)]


def _refuse(error: int) -> _Code:
    return _return(_ERRNO | error)
