"""Sandboxes in containers of a Docker engine, or of Podman, which serves the same protocol."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import aiodocker
import aiohttp

from dagrl.environments.failures import EnvironmentFailedError, FailureClass
from dagrl.sandboxes.sandbox import MOST_PROCESSES, READ_BYTES, RawResult, SandboxRequest, ShellSandbox

_LABEL = "dagrl-sandbox"
_CLOSE_S = 20.0


class DockerProvider:
    """Containers of an engine, which removes each at the end of its time."""

    def __init__(self, label: str, *, url: str | None = None, runtime: str | None = None, pull: bool = True) -> None:
        """`url` is the engine's address, by default ``DOCKER_HOST`` or the local socket. `runtime` is one of
        its runtimes, such as ``runsc`` of gVisor. With `pull`, a missing image is pulled.
        """
        self._label, self._runtime, self._pull = label, runtime, pull
        self._url = url or os.environ.get("DOCKER_HOST", "unix:///var/run/docker.sock")
        self._docker: aiodocker.Docker | None = None
        self._connector: aiohttp.UnixConnector | None = None
        self._pulling = asyncio.Lock()

    async def start(self, request: SandboxRequest) -> DockerSandbox:
        async with _failing("start"):
            docker = self._engine()
            await self._ensure(docker, request.image)
            container = await docker.containers.create(self._config(request))
            sandbox = DockerSandbox(docker, container)
            try:
                await container.start()
                await sandbox.check()
            except BaseException:
                await asyncio.shield(sandbox.close())
                raise
        return sandbox

    async def sweep(self) -> int:
        async with _failing("network"):
            filters = {"label": [f"{_LABEL}={self._label}"]}
            found = await self._engine().containers.list(all=True, filters=filters)
            await asyncio.gather(*(_delete(container) for container in found))
            return len(found)

    async def close(self) -> None:
        if self._docker is not None:
            await self._docker.close()
        if self._connector is not None:
            await self._connector.close()

    def _engine(self) -> aiodocker.Docker:
        if self._docker is None:
            kind, _, place = self._url.partition("://")
            if kind == "unix":
                # Each running command is a connection, and 100 of them would be the default.
                self._connector = aiohttp.UnixConnector(place, limit=0)
            url = self._url if self._connector is None else "unix://localhost"
            self._docker = aiodocker.Docker(url=url, connector=self._connector)
        return self._docker

    async def _ensure(self, docker: aiodocker.Docker, image: str | None) -> None:
        """Pull an image that the engine does not have, once for all that wait for it."""
        if not self._pull:
            return
        async with self._pulling:
            try:
                await docker.images.inspect(image)
            except aiodocker.DockerError as error:
                if error.status != 404:
                    raise
                await docker.images.pull(image)

    def _config(self, request: SandboxRequest) -> dict[str, object]:
        host = {
            "AutoRemove": True,
            "PidsLimit": MOST_PROCESSES,
            "NetworkMode": "bridge" if request.network else "none",
            "SecurityOpt": ["no-new-privileges"],
        }
        if request.cpus is not None:
            host["NanoCpus"] = int(request.cpus * 1e9)
        if request.memory_mib is not None:
            host |= {"Memory": request.memory_mib << 20, "MemorySwap": request.memory_mib << 20}
        if self._runtime is not None:
            host["Runtime"] = self._runtime
        return {
            "Image": request.image,
            # A shell, because the first process takes over those whose parents end.
            "Entrypoint": ["sh", "-c", f"sleep {int(request.lifetime_s)} & wait $!"],
            "Cmd": [],
            "Labels": {_LABEL: self._label},
            "HostConfig": host,
        }


PROVIDER = DockerProvider


class DockerSandbox(ShellSandbox):
    """A container."""

    def __init__(self, docker: aiodocker.Docker, container: aiodocker.containers.DockerContainer) -> None:
        self._docker, self._container = docker, container

    async def run(self, command: list[str], stdin: bytes) -> RawResult:
        async with _failing("exec"):
            process = await self._container.exec(command, stdin=bool(stdin))
            outputs = {1: bytearray(), 2: bytearray()}
            async with process.start(detach=False) as stream:
                if stdin:
                    await stream.write_in(stdin)
                while (message := await stream.read_out()) is not None:
                    outputs[message.stream] += message.data
                    if len(outputs[message.stream]) > 2 * READ_BYTES:
                        raise EnvironmentFailedError("exec", "the engine sent more than the command wrote")
            code = (await process.inspect())["ExitCode"]
            if code is None:
                raise EnvironmentFailedError("exec", "the engine ended the connection before the command")
            return RawResult(code, bytes(outputs[1]), bytes(outputs[2]))

    async def close(self) -> None:
        await _delete(self._container)


async def _delete(container: aiodocker.containers.DockerContainer) -> None:
    # It may be gone, or the engine is: its time ends it then.
    with suppress(aiodocker.DockerError, aiohttp.ClientError, OSError):
        async with asyncio.timeout(_CLOSE_S):
            await container.delete(force=True, v=True)


@asynccontextmanager
async def _failing(failure: FailureClass) -> AsyncIterator[None]:
    """Errors of the engine, as failures of this class, and of the connection to it."""
    try:
        yield
    except aiodocker.DockerError as error:
        raise EnvironmentFailedError(failure, f"Docker answered {error.status}: {error.message}"[:500]) from error
    except (aiohttp.ClientError, ConnectionError, ValueError, KeyError, TypeError) as error:
        raise EnvironmentFailedError("network", f"no answer of Docker: {error!r}"[:500]) from error
