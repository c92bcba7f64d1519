"""Sandboxes of all providers run commands, and read and write files."""

from __future__ import annotations

import asyncio
import time
import uuid
from dataclasses import replace

import pytest

from dagrl.environments.failures import EnvironmentFailedError
from dagrl.sandboxes.sandbox import OUTPUT_BYTES, READ_BYTES, TIMED_OUT


def test_a_command_has_input_variables_folder_and_exit_code(case) -> None:
    async def test(sandbox) -> None:
        await sandbox.write("made/input.txt", "from a file\n")
        done = await sandbox.exec(
            "cat input.txt -; echo $NAME; echo bad >&2; exit 7", stdin="given\n", env={"NAME": "é"}, cwd="made"
        )
        assert (done.exit_code, done.stdout, done.stderr) == (7, "from a file\ngiven\né\n", "bad\n")
        assert (await sandbox.exec(["echo", "a  b", "$NAME"])).stdout == "a  b $NAME\n"
        assert (await sandbox.exec("no-such-program")).exit_code == 127
        assert (await sandbox.exec("pwd", cwd="no/folder")).exit_code == 125

    case.use(test)


def test_files_are_bytes_in_folders_that_are_made(case) -> None:
    data = bytes(range(256)) * 1000

    async def test(sandbox) -> None:
        await sandbox.write("a/b/c d.bin", data)
        assert await sandbox.read("a/b/c d.bin") == data
        await sandbox.write("a/b/c d.bin", "short")
        assert await sandbox.read("./a/b/c d.bin") == b"short"
        with pytest.raises(FileNotFoundError, match="absent"):
            await sandbox.read("absent")
        await sandbox.exec(f"head -c {READ_BYTES + 5} /dev/zero >large")
        with pytest.raises(ValueError, match="16 MiB"):
            await sandbox.read("large")

    case.use(test)


def test_a_command_without_end_is_killed_and_the_sandbox_goes_on(case) -> None:
    async def test(sandbox) -> None:
        begun = time.monotonic()
        done = await sandbox.exec("echo begun; sleep 100", timeout_s=1)
        assert (done.exit_code, done.stdout) == (TIMED_OUT, "begun\n")
        assert time.monotonic() - begun < 50
        flood = await sandbox.exec("yes", timeout_s=1)
        assert flood.exit_code in (TIMED_OUT, 128 + 25)
        assert len(flood.stdout) == OUTPUT_BYTES
        assert (await sandbox.exec("echo alive")).stdout == "alive\n"

    case.use(test)


def test_processes_in_the_background_do_not_hold_a_command(case) -> None:
    async def test(sandbox) -> None:
        done = await sandbox.exec("(sleep 2; echo late >late) & echo now", timeout_s=30)
        assert (done.exit_code, done.stdout) == (0, "now\n")
        async with asyncio.timeout(30):
            while (await sandbox.exec("cat late")).stdout != "late\n":
                await asyncio.sleep(0.2)

    case.use(test)


def test_many_commands_run_at_once(case) -> None:
    async def test(sandbox) -> None:
        done = await asyncio.gather(*(sandbox.exec("cat", stdin=str(number)) for number in range(20)))
        assert [int(result.stdout) for result in done] == [*range(20)]

    case.use(test)


def test_a_later_owner_with_the_label_removes_what_is_left(case) -> None:
    async def run() -> None:
        label = f"left-{uuid.uuid4().hex[:8]}"
        first, second, other = (case.provider(each) for each in (label, label, f"{label}-other"))
        left = [await first.start(case.request()) for _ in range(2)]
        kept = await other.start(case.request())
        assert await second.sweep() == 2
        for sandbox in left:
            with pytest.raises(EnvironmentFailedError):
                await sandbox.exec("echo alive")
        assert (await kept.exec("echo alive")).stdout == "alive\n"
        assert await second.sweep() == 0
        await kept.close()
        for provider in (first, second, other):
            await provider.close()

    asyncio.run(run())


def test_a_container_without_an_image_does_not_start(case) -> None:
    if case.image is None:
        pytest.skip("no images")

    async def run() -> None:
        provider = case.provider()
        with pytest.raises(EnvironmentFailedError) as raised:
            await provider.start(replace(case.request(), image="localhost/no-such-image:1"))
        assert raised.value.failure == "start"
        assert await provider.sweep() == 0
        await provider.close()

    asyncio.run(run())
