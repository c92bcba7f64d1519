"""The filter as the kernel reads it, for machines too that no test runs on."""

from __future__ import annotations

import errno
import os
import re
import struct
from pathlib import Path

import pytest

from dagrl.rewards.sandbox.syscalls import CHANGES_GROUPS, CHANGES_NAMES, FORBIDDEN, filter_program

KILL, ERRNO, ALLOW = 0x80000000, 0x00050000, 0x7FFF0000
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
HEADERS = {"x86_64": "/usr/include/x86_64-linux-gnu/asm/unistd_64.h", "aarch64": "/usr/include/asm-generic/unistd.h"}
OPENAT = {"x86_64": 257, "aarch64": 56}
CLONE = {"x86_64": 56, "aarch64": 220}
SOCKETPAIR = {"x86_64": 53, "aarch64": 199}
READ = {"x86_64": 0, "aarch64": 63}


def answer(program: bytes, number: int, arguments: tuple[int, ...] = (), *, architecture: int) -> int:
    """What the filter says to a system call: classic BPF, as bpf(4) and seccomp(2) describe it."""
    data = struct.pack("=IIQ6Q", number, architecture, 0, *arguments, *[0] * (6 - len(arguments)))
    code = list(struct.iter_unpack("=HBBI", program))
    accumulator = place = 0
    while True:
        operation, if_true, if_false, operand = code[place]
        place += 1
        match operation:
            case 0x20:
                (accumulator,) = struct.unpack_from("=I", data, operand)
            case 0x54:
                accumulator &= operand
            case 0x06:
                return operand
            case 0x15 | 0x35 | 0x45:
                holds = {0x15: accumulator == operand, 0x35: accumulator >= operand, 0x45: accumulator & operand}
                place += if_true if holds[operation] else if_false
            case _:
                raise AssertionError(f"no instruction {operation:#x}")


@pytest.fixture(params=list(ARCHITECTURES))
def machine(request: pytest.FixtureRequest) -> str:
    return request.param


def test_only_forbidden_calls_are_refused(machine: str) -> None:
    program, place = filter_program(machine, write_files=True), [*ARCHITECTURES].index(machine)
    for name, numbers in FORBIDDEN.items():
        if numbers[place] is not None:
            assert answer(program, numbers[place], architecture=ARCHITECTURES[machine]) == ERRNO | errno.EPERM, name
    for numbers in ((READ[machine],), *((each[place],) for each in CHANGES_NAMES.values() if each[place] is not None)):
        assert answer(program, numbers[0], architecture=ARCHITECTURES[machine]) == ALLOW


@pytest.mark.parametrize("write_files", [True, False])
def test_without_writing_nothing_can_be_opened_for_it_or_renamed(machine: str, write_files: bool) -> None:
    program, place = filter_program(machine, write_files=write_files), [*ARCHITECTURES].index(machine)
    number, architecture = OPENAT[machine], ARCHITECTURES[machine]
    for flags in (os.O_WRONLY, os.O_RDWR, os.O_CREAT | os.O_WRONLY, os.O_TMPFILE | os.O_RDWR):
        said = answer(program, number, (0, 0, flags), architecture=architecture)
        assert said == (ALLOW if write_files else ERRNO | errno.EACCES)
    assert answer(program, number, (0, 0, os.O_RDONLY), architecture=architecture) == ALLOW
    cut = answer(program, number, (0, 0, os.O_RDONLY | os.O_TRUNC), architecture=architecture)
    assert cut == ERRNO | errno.EACCES
    renaming = answer(program, CHANGES_NAMES["renameat2"][place], architecture=architecture)
    assert renaming == (ALLOW if write_files else ERRNO | errno.EPERM)


def test_a_thread_is_no_process(machine: str) -> None:
    program, architecture = filter_program(machine, write_files=True), ARCHITECTURES[machine]
    thread_flags, fork_flags = 0x3D0F00, 0x1200011  # As glibc's pthread_create and fork pass them.
    files = 0x400
    assert answer(program, CLONE[machine], (thread_flags,), architecture=architecture) == ALLOW
    for flags in (fork_flags, thread_flags & ~files):
        assert answer(program, CLONE[machine], (flags,), architecture=architecture) == ERRNO | errno.EPERM


def test_processes_stay_in_their_group_and_namespaces(machine: str) -> None:
    architecture, place = ARCHITECTURES[machine], [*ARCHITECTURES].index(machine)
    program = filter_program(machine, write_files=True, forks=True)
    fork_flags, new_user, new_namespace = 0x1200011, 0x10000000, 0x20000
    assert answer(program, CLONE[machine], (fork_flags,), architecture=architecture) == ALLOW
    for flags in (fork_flags | new_user, fork_flags | new_namespace):
        assert answer(program, CLONE[machine], (flags,), architecture=architecture) == ERRNO | errno.EPERM
    for numbers in CHANGES_GROUPS.values():
        number = numbers[place]
        assert number is not None
        assert answer(program, number, architecture=architecture) == ERRNO | errno.EPERM
        assert answer(filter_program(machine, write_files=True), number, architecture=architecture) == ALLOW


def test_threads_cannot_part_from_each_others_files(machine: str) -> None:
    program, architecture = filter_program(machine, write_files=True), ARCHITECTURES[machine]
    close_range, unshare, on_exec = 436, 2, 4
    assert answer(program, close_range, (3, 64, on_exec), architecture=architecture) == ALLOW
    assert answer(program, close_range, (3, 64, unshare), architecture=architecture) == ERRNO | errno.EPERM


def test_pairs_of_sockets_are_streams_of_this_machine(machine: str) -> None:
    program, architecture = filter_program(machine, write_files=True), ARCHITECTURES[machine]
    close_on_exec, unix, tipc, stream, datagram = 0o2000000, 1, 30, 1, 2
    for arguments, allowed in (
        ((unix, stream), True),
        ((unix, stream | close_on_exec), True),
        ((unix, datagram), False),
        ((unix, datagram | close_on_exec), False),
        ((tipc, stream), False),
    ):
        said = answer(program, SOCKETPAIR[machine], arguments, architecture=architecture)
        assert said == (ALLOW if allowed else ERRNO | errno.EPERM), arguments


def test_another_architecture_is_the_end(machine: str) -> None:
    program = filter_program(machine, write_files=True)
    assert answer(program, READ[machine], architecture=0x40000003) == KILL
    assert answer(program, 0x40000000 + READ[machine], architecture=ARCHITECTURES[machine]) == KILL


def test_an_unknown_processor_architecture_is_refused() -> None:
    with pytest.raises(OSError, match="knows the system calls of x86_64 and aarch64, not of riscv64"):
        filter_program("riscv64", write_files=True)


def test_the_numbers_are_those_of_the_kernels_headers(machine: str) -> None:
    header = Path(HEADERS[machine])
    if not header.is_file():
        pytest.skip("the kernel's headers are not installed")
    pairs = re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", header.read_text())
    known = {name: int(number) for name, number in pairs}
    place = [*ARCHITECTURES].index(machine)
    for name, numbers in {**FORBIDDEN, **CHANGES_NAMES}.items():
        assert numbers[place] == known.get(name), name
