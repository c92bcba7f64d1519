"""The sandbox runs programs, and keeps hostile ones in: each attack is tried for real."""

from __future__ import annotations

import glob
import os
import platform
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from dagrl.rewards.sandbox import Outcome, run, run_bash
from dagrl.rewards.sandbox.runner import MAX_SUBSHELLS, MAX_THREADS


def attempt(*attacks: str, **limits) -> list[str]:
    """What came of each attack, all in one program: DONE where it succeeded, else the exception."""
    program = "import os\n"
    for attack in attacks:
        indented = "\n".join(f"    {line}" for line in attack.strip().splitlines())
        program += f"try:\n{indented}\n    said = 'DONE'\nexcept BaseException as error:\n    said = repr(error)\n"
        program += "print('\\0' + said)\n"
    said = run(program, timeout_s=60, **limits).stdout.split("\0")[1:]
    assert len(said) == len(attacks), said
    return [each.strip() for each in said]


def assert_forbidden(*attacks: str, by: tuple[str, ...] = ("PermissionError",), **limits) -> None:
    """Each attack fails with one of these errors."""
    for attack, said in zip(attacks, attempt(*attacks, **limits), strict=True):
        assert any(error in said for error in by), (attack, said)


def test_a_program_reads_its_input_and_writes_its_outputs() -> None:
    result = run("import sys\nprint(input()[::-1])\nprint('no', file=sys.stderr)", stdin="über\n")
    assert (result.outcome, result.exit_status) == (Outcome.FINISHED, 0)
    assert (result.stdout, result.stderr) == ("rebü\n", "no\n")


def test_the_exit_status_of_a_program_is_reported() -> None:
    raised = run("def f():\n    raise KeyError('x')\nf()")
    assert (raised.outcome, raised.exit_status) == (Outcome.FAILED, 1)
    assert "line 2, in f" in raised.stderr and "KeyError: 'x'" in raised.stderr
    assert run("import sys; sys.exit(7)").exit_status == 7
    assert run("import ctypes; ctypes.string_at(0)").exit_status == -signal.SIGSEGV
    assert run("print(").outcome is Outcome.FAILED


def test_the_valid_part_of_invalid_utf8_is_returned() -> None:
    assert run("import os; os.write(1, b'a\\xffb')").stdout == "a\N{REPLACEMENT CHARACTER}b"
    assert run("print(len(input()))", stdin="a\ud800b").stdout == "3\n"


def test_usual_contest_programs_are_allowed() -> None:
    deep = """
import sys, threading
sys.setrecursionlimit(10**6)
threading.stack_size(2**26)
def down(n):
    return 0 if n == 0 else 1 + down(n - 1)
thread = threading.Thread(target=lambda: print(down(50000)))
thread.start()
thread.join()
"""
    assert run(deep).stdout == "50000\n"
    assert run("import asyncio\nasync def two(): return 2\nprint(asyncio.run(two()))").stdout == "2\n"
    own_file = "open('a.txt', 'w').write('x')\nimport tempfile, os\nos.remove('a.txt')\nf = tempfile.TemporaryFile()\n"
    assert run(own_file + "print(f.write(b'123'), os.listdir())").stdout == "3 ['main.py']\n"
    assert run("import numpy\nprint(numpy.eye(3) @ numpy.arange(3))").stdout == "[0. 1. 2.]\n"


def test_files_are_beside_the_program_and_are_removed_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    result = run("print(open('data.txt').read())\nopen('more.txt', 'w')", files={"data.txt": "seven"})
    assert (result.outcome, result.stdout) == (Outcome.FINISHED, "seven\n")
    assert list(tmp_path.iterdir()) == []


def test_two_runs_write_the_same() -> None:
    code = "import os\nprint(set('abcdefgh'), os.getcwd())\nraise ValueError(os.path.abspath('x'))"
    one, other = run(code), run(code)
    assert (one.stdout, one.stderr) == (other.stdout, other.stderr)
    assert one.stdout.endswith(" .\n")
    assert 'File "main.py", line 3' in one.stderr and one.stderr.endswith("ValueError: x\n")


@pytest.mark.parametrize("name", ["../a", "/etc/a", "a/b"])
def test_a_file_stays_in_the_folder(name: str) -> None:
    with pytest.raises(ValueError, match="has a name, not a path"):
        run("", files={name: ""})


@pytest.mark.parametrize("limit", [{"timeout_s": 0}, {"memory_mib": 10}, {"file_mib": -1}])
def test_limits_that_are_none_are_refused(limit: dict) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(limit))} of the sandbox must be"):
        run("", **limit)


def test_many_run_at_once() -> None:
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda number: run("print(int(input()) ** 2)", stdin=str(number)), range(16)))
    assert [int(result.stdout) for result in results] == [number**2 for number in range(16)]


class TestTime:
    @pytest.mark.parametrize("code", ["while True: pass", "import time; time.sleep(60)", "9**9**9"])
    def test_an_endless_program_is_ended(self, code: str) -> None:
        assert run(code, timeout_s=0.3).outcome is Outcome.TIMED_OUT

    def test_earlier_output_is_kept(self) -> None:
        result = run("import time\nprint('begun', flush=True)\nwhile True: time.sleep(1)", timeout_s=6)
        assert (result.outcome, result.stdout) == (Outcome.TIMED_OUT, "begun\n")

    def test_signals_that_it_ignores_do_not_keep_it_alive(self) -> None:
        code = (
            "import signal, time\nfor each in signal.valid_signals() - {9, 19}: signal.signal(each, signal.SIG_IGN)\n"
        )
        result = run(code + "print('deaf', flush=True)\nwhile True: time.sleep(1)", timeout_s=6)
        assert (result.outcome, result.stdout) == (Outcome.TIMED_OUT, "deaf\n")


class TestMemoryAndOutput:
    @pytest.mark.parametrize(
        "code", ["x = bytearray(1 << 30)", "import mmap\nmmap.mmap(-1, 1 << 30)", "x = [0]\nwhile True: x += x"]
    )
    def test_memory_is_bounded(self, code: str) -> None:
        result = run(code, memory_mib=256)
        assert result.outcome is Outcome.FAILED
        assert "MemoryError" in result.stderr or "Cannot allocate memory" in result.stderr

    def test_memory_that_no_process_owns_cannot_be_had(self) -> None:
        shared = "from multiprocessing import shared_memory\nshared_memory.SharedMemory(create=True, size=1 << 20)"
        assert_forbidden("os.memfd_create('x')", shared)

    @pytest.mark.parametrize("stream", ["stdout", "stderr"])
    def test_output_without_end_is_cut(self, stream: str) -> None:
        result = run(f"import sys\nwhile True: sys.{stream}.write('x' * 65536)", file_mib=1, timeout_s=30)
        assert result.outcome is Outcome.TOO_MUCH
        assert len(getattr(result, stream)) == 1 << 20

    def test_one_large_file_cannot_be_written(self) -> None:
        result = run("open('a', 'wb').write(bytes(2 << 20))", file_mib=1)
        # Whatever comes first: the file's own bound, or that of all files.
        assert result.outcome is Outcome.TOO_MUCH or "File too large" in result.stderr

    @pytest.mark.parametrize(
        "more",
        [
            "open(f'{number}', 'wb').write(bytes(1 << 19))",
            "open(f'{number}', 'wb')",
            "held.append(open('a', 'wb')); os.remove('a'); held[-1].write(bytes(1 << 19)); held[-1].flush()",
            "with open('a', 'w+b') as a: a.write(bytes(4096)); libc.mmap(0, 4096, 1, 1, a.fileno(), 0); os.remove('a')",
        ],
        ids=["large files", "empty files", "removed files", "mapped files"],
    )
    def test_many_files_end_the_program(self, more: str) -> None:
        code = "import ctypes, os, time\nheld, libc = [], ctypes.CDLL(None)\n"
        code += f"for number in range(1000):\n    if len(held) < 50:\n        {more}\n"
        result = run(code + "time.sleep(60)", file_mib=2, timeout_s=30)
        assert result.outcome is Outcome.TOO_MUCH

    def test_files_of_a_thread_that_outlives_the_first_one_are_seen(self) -> None:
        code = """
import ctypes, os, threading, time
def hold():
    held = []
    for _ in range(8):
        held.append(open('a', 'wb', buffering=0))
        os.remove('a')
        held[-1].write(bytes(1 << 19))
    time.sleep(60)
threading.Thread(target=hold).start()
ctypes.CDLL(None).pthread_exit(None)
"""
        assert run(code, file_mib=2, timeout_s=30).outcome is Outcome.TOO_MUCH

    def test_hidden_open_files_are_impossible(self) -> None:
        raising = "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        raising += "if libc.{} < 0: raise OSError(ctypes.get_errno(), 'refused')"
        assert_forbidden(
            "os.link('main.py', 'link')",
            "import socket\na, b = socket.socketpair()\nsocket.send_fds(a, [b'x'], [0])",
            raising.format("fallocate(os.open('f', os.O_RDWR | os.O_CREAT), 1, 0, 1 << 30)"),
            raising.format("close_range(3, 10, 2)"),
        )

    def test_threads_are_bounded(self) -> None:
        code = "import threading, time\nthreading.stack_size(1 << 16)\n"
        code += f"for _ in range({2 * MAX_THREADS}): threading.Thread(target=time.sleep, args=(60,)).start()"
        assert run(code, timeout_s=30).outcome is Outcome.TOO_MUCH

    def test_per_user_resources_cannot_be_exhausted(self) -> None:
        raising = "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        raising += "if libc.{} < 0: raise OSError(ctypes.get_errno(), 'refused')"
        assert_forbidden(
            raising.format("timer_create(0, None, ctypes.byref(ctypes.c_void_p()))"),
            raising.format("inotify_init()"),
            "import fcntl\nfcntl.fcntl(os.pipe()[0], 1031, 1 << 20)",
            "import fcntl, json\nfcntl.flock(open(json.__file__), fcntl.LOCK_EX)",
            # A file system's own commands: its attributes, and a folder that is none.
            "import fcntl\nfcntl.ioctl(open('main.py'), 0x80086601, bytes(8))",
        )

    def test_limits_cannot_be_raised(self) -> None:
        raising = "import resource\nresource.setrlimit(resource.RLIMIT_{}, (-1, -1))"
        limits = ("AS", "CPU", "FSIZE", "NOFILE")
        assert_forbidden(*(raising.format(limit) for limit in limits), by=("not allowed to raise",))
        assert_forbidden(f"import resource\nresource.prlimit({os.getpid()}, resource.RLIMIT_NOFILE, (3, 3))")


class TestProcesses:
    def test_no_process_can_be_started(self) -> None:
        assert_forbidden(
            "while True: os.fork()",
            "if os.fork(): os._exit(0)\nos.setsid()",
            "import subprocess\nsubprocess.run(['/bin/true'])",
            "os.posix_spawn('/bin/true', ['true'], {})",
            "import multiprocessing\nmultiprocessing.Process(target=print).start()",
        )

    def test_no_other_program_can_be_become(self) -> None:
        assert_forbidden("os.execv('/bin/sh', ['sh', '-c', 'echo DONE'])")

    def test_other_processes_are_out_of_reach(self) -> None:
        attacks = (
            "os.kill({pid}, 9)",
            "os.kill(os.getppid(), 9)",
            "os.killpg(os.getpgid({pid}), 9)",
            "os.kill(-1, 9)",
            "import signal\nsignal.pidfd_send_signal(os.pidfd_open({pid}), 9)",
            "import fcntl\nr, w = os.pipe()\nfcntl.fcntl(r, fcntl.F_SETOWN, {pid})",
            "import fcntl, socket, struct\na, b = socket.socketpair()\nfcntl.ioctl(a, 0x8901, struct.pack('i', {pid}))",
            "os.setpriority(os.PRIO_PROCESS, {pid}, 19)",
            "os.sched_setaffinity({pid}, [0])",
        )
        told = ("PermissionError", "Function not implemented")
        assert_forbidden(*(attack.format(pid=os.getpid()) for attack in attacks), by=told)

    def test_memory_and_environment_of_its_parent_cannot_be_read(self) -> None:
        names = ("environ", "mem", "cmdline", "maps", "fd/0")
        assert_forbidden(*(f"open('/proc/{os.getpid()}/{name}', 'rb').read(1)" for name in names))

    def test_it_dies_with_its_parent_and_cannot_choose_not_to(self) -> None:
        code = "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        assert_forbidden(code + "if libc.prctl(1, 0, 0, 0, 0): raise OSError(ctypes.get_errno(), 'prctl')")

    @pytest.mark.skipif(platform.machine() != "x86_64", reason="machine code of x86_64")
    def test_the_other_table_of_system_calls_is_no_way_out(self) -> None:
        code = (
            "import ctypes, mmap\n"
            "page = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)\n"
            "page.write(bytes.fromhex('b814000000cd80c3'))  # mov eax, 20; int 0x80; ret\n"
            "ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))()\n"
        )
        assert run(code).exit_status == -signal.SIGSYS

    def test_new_system_calls_do_not_exist(self) -> None:
        numbers = (425, 434, 435, 438, 100_000)  # io_uring_setup, pidfd_open, clone3, pidfd_getfd, the future
        code = "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        code += "libc.syscall({}, 0, 0, 0, 0, 0)\nraise OSError(ctypes.get_errno(), 'answer')"
        assert_forbidden(*(code.format(number) for number in numbers), by=("OSError(38, 'answer')",))


class TestNetwork:
    def test_there_are_no_sockets(self) -> None:
        families = ("AF_INET", "AF_INET6", "AF_UNIX", "AF_NETLINK", "AF_PACKET")
        assert_forbidden(*(f"import socket\nsocket.socket(socket.{family})" for family in families))

    def test_a_socket_pair_reaches_only_itself(self, tmp_path: Path) -> None:
        assert run("import socket\na, b = socket.socketpair()\na.send(b'x')\nprint(b.recv(1))").stdout == "b'x'\n"
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as log:
            log.bind(str(tmp_path / "log"))
            log.settimeout(0.2)
            attack = "import socket\na, b = socket.socketpair(socket.AF_UNIX, socket.{})\na.sendto(b'x', {!r})"
            kinds = ("SOCK_DGRAM", "SOCK_SEQPACKET", "SOCK_STREAM")
            told = ("PermissionError", "Transport endpoint is already connected", "Operation not supported")
            assert_forbidden(*(attack.format(kind, str(tmp_path / "log")) for kind in kinds), by=told)
            with pytest.raises(TimeoutError):
                log.recv(1)

    def test_a_server_on_this_machine_receives_nothing(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            server.settimeout(0.2)
            port = server.getsockname()[1]
            asking = f"import urllib.request\nurllib.request.urlopen('http://127.0.0.1:{port}', timeout=5)"
            assert_forbidden(asking, by=("Operation not permitted",))
            with pytest.raises(TimeoutError):
                server.accept()


class TestFiles:
    @pytest.fixture
    def secret(self, tmp_path: Path) -> Path:
        path = tmp_path / "id_ed25519"
        path.write_text("secret")
        path.chmod(0o644)
        return path

    def test_files_of_the_user_cannot_be_read(self, secret: Path) -> None:
        assert_forbidden(f"print(open({str(secret)!r}).read())", f"os.listdir({str(secret.parent)!r})")
        others = ("/etc/passwd", "/proc/self/environ", "/proc/cpuinfo", "/", str(Path.home()), __file__)
        assert_forbidden(*(f"os.open({path!r}, os.O_RDONLY)" for path in others))

    def test_files_of_the_user_cannot_be_changed(self, secret: Path) -> None:
        before = secret.stat()
        name = str(secret)
        assert_forbidden(
            f"open({name!r}, 'w')",
            f"os.open({name!r}, os.O_RDONLY | os.O_TRUNC)",
            f"os.truncate({name!r}, 0)",
            f"os.remove({name!r})",
            f"os.rename({name!r}, 'mine')",
            f"os.link({name!r}, 'mine')",
            f"os.chmod({name!r}, 0o777)",
            f"os.chown({name!r}, 1, 1)",
            f"os.utime({name!r}, (0, 0))",
            f"os.setxattr({name!r}, 'user.x', b'y')",
            f"open({str(secret.parent / 'new')!r}, 'w')",
            "open('../outside', 'w')",
            "open('/tmp/dagrl-outside', 'w')",
            "open('/dev/shm/dagrl-outside', 'w')",
            "import json; open(json.__file__, 'a')",
            by=("PermissionError", "Invalid cross-device link"),
        )
        assert secret.stat() == before
        assert secret.read_text() == "secret"
        assert list(secret.parent.iterdir()) == [secret]

    def test_links_and_folders_cannot_be_made(self, secret: Path) -> None:
        assert_forbidden(f"os.symlink({str(secret)!r}, 'link')", "os.mkdir('folder')", "os.mkfifo('pipe')")

    def test_the_environment_is_empty_of_what_the_user_has_set(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("OPENAI_API_KEY", "secret")
        assert "secret" not in run("import os\nprint(os.environ)").stdout

    def test_no_file_of_this_process_is_open_in_it(self) -> None:
        reader, writer = os.pipe()
        os.set_inheritable(writer, True)
        try:
            assert_forbidden(f"os.write({writer}, b'x')", by=("Bad file descriptor",))
            opened = "import fcntl\n" + "\n".join(f"fcntl.fcntl({fd}, fcntl.F_GETFD)" for fd in range(3))
            assert attempt(opened) == ["DONE"]
            others = (f"import fcntl\nfcntl.fcntl({fd}, fcntl.F_GETFD)" for fd in range(3, 64))
            assert_forbidden(*others, by=("Bad file descriptor",))
        finally:
            os.close(reader)
            os.close(writer)

    def test_modules_beside_the_caller_are_not_imported(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "sneaky.py").write_text("")
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        monkeypatch.chdir(tmp_path)
        assert_forbidden("import sneaky", by=("ModuleNotFoundError",))


def test_root_has_no_privileges_in_the_sandbox() -> None:
    assert_forbidden("os.chroot('.')", "os.setgroups([])", "os.nice(-5)")


class TestWithoutLandlock:
    """`hide_files=False`, for kernels that have none."""

    def test_nothing_can_be_written_nor_removed(self, tmp_path: Path) -> None:
        victim = tmp_path / "file"
        victim.write_text("text")
        name = str(victim)
        assert_forbidden(
            f"open({name!r}, 'a')",
            f"os.open({name!r}, os.O_RDONLY | os.O_TRUNC)",
            f"os.remove({name!r})",
            f"os.rename({name!r}, {name + '2'!r})",
            f"os.symlink({name!r}, {name + '2'!r})",
            f"os.link({name!r}, {name + '2'!r})",
            f"os.mkdir({name + '2'!r})",
            f"os.mkfifo({name + '2'!r})",
            "open('own.txt', 'w')",
            "import tempfile; tempfile.TemporaryFile()",
            by=("PermissionError", "No usable temporary directory"),
            hide_files=False,
        )
        assert list(tmp_path.iterdir()) == [victim]
        assert victim.read_text() == "text"

    def test_there_are_no_network_and_no_processes_either(self) -> None:
        assert_forbidden("import socket\nsocket.socket()", "os.fork()", hide_files=False)
        assert run("print(input())", stdin="in", hide_files=False).stdout == "in\n"


def test_a_process_that_cannot_be_confined_runs_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("dagrl.rewards.sandbox.runner.python_paths", lambda: [f"{tmp_path}\0"])
    with pytest.raises(OSError, match="code cannot be confined on this machine: "):
        run("print('DONE')")


WITHOUT = """
import ctypes, errno, struct, sys
LOAD, EQUAL, RETURN, ALLOW, ERRNO = 0x20, 0x15, 0x06, 0x7FFF0000, 0x00050000
code = [(LOAD, 0, 0, 0), (EQUAL, 0, 1, int(sys.argv[1])), (RETURN, 0, 0, ERRNO | errno.ENOSYS), (RETURN, 0, 0, ALLOW)]
program = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *each) for each in code))
libc = ctypes.CDLL(None)
assert libc.prctl(38, 1, 0, 0, 0) == 0
assert libc.prctl(22, 2, struct.pack("@HP", len(code), ctypes.addressof(program)), 0, 0) == 0
from dagrl.rewards.sandbox import run
try:
    print(run("print('DONE')"))
except OSError as error:
    print(error)
print(run("print('DONE')", hide_files=False).stdout)
"""
"""Tries the sandbox on a kernel without some system call."""


def test_without_landlock_nothing_runs_unless_allowed() -> None:
    landlock_create_ruleset = "444"
    said = subprocess.run([sys.executable, "-c", WITHOUT, landlock_create_ruleset], capture_output=True, text=True)
    assert said.stdout.splitlines() == [
        "code cannot be confined on this machine: the kernel has no Landlock, which hides the user's files; "
        "`hide_files: false` does without (Function not implemented)",
        "DONE",
        "",
    ], said.stderr


def test_another_thread_may_end_while_one_runs() -> None:
    results = []
    thread = threading.Thread(target=lambda: results.append(run("import time; time.sleep(0.3); print(1)")))
    thread.start()
    other = threading.Thread(target=run, args=("",))
    other.start()
    other.join()
    thread.join()
    assert results[0].stdout == "1\n"


def bash(code: str, *arguments: str, visible: str = "/nowhere", **limits):
    return run_bash(code, visible=[visible], arguments=["script", *arguments], environment={"A": "a"}, **limits)


def test_bash_has_its_builtins_and_subshells(tmp_path: Path) -> None:
    (tmp_path / "data.txt").write_text("seven\n")
    result = bash(
        'echo "$0 $1 $A $(echo b | { read x; echo $x; })"; read y < "$2"; echo $y', "1", f"{tmp_path}/data.txt"
    )
    assert (result.outcome, result.stdout) == (Outcome.FINISHED, "script 1 a b\n\n")
    result = bash('read y < "$1"; echo $y', f"{tmp_path}/data.txt", visible=str(tmp_path))
    assert result.stdout == "seven\n"


def test_bash_starts_no_program_of_the_system_and_none_through_the_loader(tmp_path: Path) -> None:
    echo = shutil.copy("/bin/echo", tmp_path)
    loaders = [path for pattern in ("/lib64/ld-linux*", "/lib/ld-linux*") for path in glob.glob(pattern)]  # noqa: PTH207
    assert loaders
    for attack in (f"{loaders[0]} {echo} DONE", f"exec {loaders[0]} {echo} DONE", f"({loaders[0]} {echo} DONE)"):
        result = bash(attack, visible=str(tmp_path))
        assert result.stdout == ""
        assert "not permitted" in result.stderr


@pytest.mark.parametrize(
    "attack",
    [
        "/bin/ls",
        "PATH=/usr/bin:/bin; ls",
        "{tmp_path}/program",
        "exec {tmp_path}/program",
        "echo x > {tmp_path}/new",
        "echo x >> {tmp_path}/program",
        "exec 3<>/dev/tcp/127.0.0.1/80",
        "kill -9 $PPID",
        "read x < /etc/passwd",
        "source /etc/profile",
    ],
)
def test_bash_starts_no_program_and_writes_and_sends_nothing(tmp_path: Path, attack: str) -> None:
    program = tmp_path / "program"
    program.write_text("#!/bin/sh\necho DONE\n")
    program.chmod(0o755)
    result = bash(attack.format(tmp_path=tmp_path) + " && echo DONE", visible=str(tmp_path))
    assert "DONE" not in result.stdout
    assert any(error in result.stderr for error in ("Permission denied", "not permitted")), result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["program"]


@pytest.mark.parametrize(
    ("code", "outcome"),
    [
        ("set -m; for i in 1 2 3; do while :; do :; done & done; while :; do :; done", Outcome.TIMED_OUT),
        (
            f"for ((i = 0; i < {2 * MAX_SUBSHELLS}; i++)); do read x < <(while :; do :; done) & done; wait",
            Outcome.TOO_MUCH,
        ),
    ],
)
def test_bash_leaves_no_process(tmp_path: Path, code: str, outcome: Outcome) -> None:
    assert bash(code, str(tmp_path), timeout_s=2).outcome is outcome
    deadline = time.monotonic() + 60  # They are killed, and the kernel removes them soon.
    while any(str(tmp_path) in (process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])):
        assert time.monotonic() < deadline
        time.sleep(0.05)
