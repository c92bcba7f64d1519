"""A Harbor environment without containers: Linux namespaces over the programs of this machine.

A task has its own ``/app``, ``/logs``, ``/tests``, ``/tmp`` and home folder, and sees this machine's programs,
read-only. Its processes end with the environment, or with the process that has started it.
"""

from __future__ import annotations

import asyncio
import io
import os
import signal
import tarfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from harbor.environments.base import BaseEnvironment, ExecResult, transfer_tar_filter
from harbor.environments.capabilities import EnvironmentCapabilities

_MOST_BYTES, _OUTPUT_BYTES = 256 << 20, 4 << 20
"""The longest transfer of files out of the environment, and what is kept of the beginning of a command's output."""
_START_S, _END_S = 30.0, 5.0
_NEW_ROOT = """
mount --bind "$1" "$1" && cd "$1" || exit
for place in /bin /sbin /lib /lib32 /lib64 /usr /etc /opt; do
  if [ -L "$place" ]; then cp -P "$place" .; elif [ -d "$place" ]; then
    mkdir ".$place" && mount --rbind "$place" ".$place" && mount -o remount,bind,ro ".$place" || exit
  fi
done
mkdir -p dev/pts dev/shm proc sys run var home root app before && mkdir -m 1777 tmp || exit
for place in null zero full random urandom tty; do
  touch "dev/$place" && mount --bind "/dev/$place" "dev/$place" || exit
done
ln -s /proc/self/fd dev/fd && ln -s pts/ptmx dev/ptmx || exit
mount -t devpts -o newinstance,ptmxmode=0666 devpts dev/pts && mount -t proc -o ro proc proc || exit
pivot_root . before && umount -l /before && rmdir /before || exit
echo ready
exec cat
"""
# Without this capability, a command cannot mount what is read-only again as writable.
_ENTERED = ("setpriv", "--bounding-set=-sys_admin", "--inh-caps=-sys_admin", "--")


class LocalEnvironment(BaseEnvironment):
    """Processes in their own user, mount and process namespaces. Confines mistakes, not attacks: it shares the network
    and the kernel with this machine, has no limits of memory or CPU time, and can read this machine's ``/etc``.
    """

    _process: asyncio.subprocess.Process | None = None

    @staticmethod
    def type() -> str:
        return "local"

    @property
    def capabilities(self) -> EnvironmentCapabilities:
        return EnvironmentCapabilities(disable_internet=True)

    def _validate_definition(self) -> None:
        self._cwd = self.task_env_config.workdir or "/app"

    async def start(self, force_build: bool) -> None:
        root = self.trial_paths.trial_dir.parent / f"{self.session_id}-root"
        root.mkdir()
        alone = ["--net"] if self._network_disabled else []
        self._process = await asyncio.create_subprocess_exec(
            *("unshare", "--user", "--map-root-user", "--mount", "--pid", "--fork", *alone),
            *("sh", "-c", _NEW_ROOT, "sh", str(root)),
            # Its end, with this process, ends the first process of the namespace, and thereby all others.
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        assert self._process.stdout is not None and self._process.stderr is not None
        async with asyncio.timeout(_START_S):
            if await self._process.stdout.readline() != b"ready\n":
                reason = (await self._process.stderr.read(1000)).decode(errors="replace").strip()
                raise RuntimeError(f"`environment: local` needs Linux with user namespaces and util-linux: {reason}")
        await self._checked("mkdir", "-p", self._cwd, "/logs/agent", "/logs/verifier", "/logs/artifacts")
        if self.environment_dir.is_dir():
            await self.upload_dir(self.environment_dir, self._cwd)

    async def stop(self, delete: bool) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        process.stdin.close()
        try:
            async with asyncio.timeout(_END_S):
                await process.wait()
        except TimeoutError:
            with suppress(ProcessLookupError):
                process.kill()

    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: int | None = None,
        user: str | int | None = None,
    ) -> ExecResult:
        """Run a command in bash. There is one user: `user` is ignored."""
        variables = {"PATH": os.defpath + ":/usr/local/bin:/usr/sbin:/sbin", "HOME": "/root", "LANG": "C.UTF-8"}
        variables |= self._merge_env(env) or {}
        named = [f"{name}={value}" for name, value in variables.items()]
        arguments = ["env", "-i", "-C", cwd or self._cwd, *named, "bash", "-c", command]
        try:
            async with asyncio.timeout(timeout_sec):
                code, output, errors = await self._run(arguments, most=_OUTPUT_BYTES)
        except TimeoutError as error:
            raise RuntimeError(f"Command timed out after {timeout_sec} seconds") from error
        return ExecResult(
            stdout=output.decode(errors="replace"), stderr=errors.decode(errors="replace"), return_code=code
        )

    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        data = await asyncio.to_thread(Path(source_path).read_bytes)
        script = 'mkdir -p "$(dirname "$1")" && cat >"$1"'
        await self._checked("sh", "-c", script, "sh", str(target_path), stdin=data)

    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        data = io.BytesIO()
        with tarfile.open(fileobj=data, mode="w") as archive:
            archive.add(source_dir, ".")
        script = 'mkdir -p "$1" && tar -x -C "$1" --no-same-owner'
        await self._checked("sh", "-c", script, "sh", str(target_dir), stdin=data.getvalue())

    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        Path(target_path).write_bytes(await self._checked("cat", str(source_path)))

    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        await self.download_dir_with_exclusions(source_dir=source_dir, target_dir=target_dir, exclude=[])

    async def download_dir_with_exclusions(
        self, *, source_dir: str, target_dir: Path | str, exclude: list[str]
    ) -> None:
        excluded = [f"--exclude={pattern}" for pattern in exclude]
        data = await self._checked("tar", "-c", *excluded, "-C", str(source_dir), ".")
        with tarfile.open(fileobj=io.BytesIO(data)) as archive:
            archive.extractall(target_dir, filter=transfer_tar_filter)

    async def _checked(self, *arguments: str, stdin: bytes = b"") -> bytes:
        code, output, errors = await self._run(arguments, stdin)
        if code or len(output) == _MOST_BYTES:
            reason = errors.decode(errors="replace").strip() or f"more than {_MOST_BYTES >> 20} MiB"
            raise RuntimeError(f"`{' '.join(arguments)[:200]}` failed: {reason}")
        return output

    async def _run(
        self, arguments: Sequence[str], stdin: bytes = b"", *, most: int = _MOST_BYTES
    ) -> tuple[int, bytes, bytes]:
        """Exit code and the beginnings of standard output and error. Kills the command if cancelled."""
        if self._process is None or self._process.returncode is not None:
            raise RuntimeError("the environment has ended")
        place = f"/proc/{self._process.pid}/ns"
        process = await asyncio.create_subprocess_exec(
            *("nsenter", f"--user={place}/user", f"--mount={place}/mnt", f"--pid={place}/pid_for_children"),
            *((f"--net={place}/net",) if self._network_disabled else ()),
            *("--wd=/", *_ENTERED, *arguments),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        output, errors = bytearray(), bytearray()
        reads = [
            asyncio.create_task(_read_beginning(process.stdout, output, most)),
            asyncio.create_task(_read_beginning(process.stderr, errors, _OUTPUT_BYTES)),
        ]
        try:
            process.stdin.write(stdin)
            process.stdin.close()
            code = await process.wait()
            # Processes in the background may keep the outputs open.
            await asyncio.wait(reads, timeout=_END_S)
        finally:
            for read in reads:
                read.cancel()
            if process.returncode is None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        return code, bytes(output), bytes(errors)


async def _read_beginning(reader: asyncio.StreamReader, into: bytearray, most: int) -> None:
    while data := await reader.read(1 << 16):
        into += data[: most - len(into)]
