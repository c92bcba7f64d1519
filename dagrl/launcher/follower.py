"""Ranks above 0: connect to rank 0, run Ray at its request, and end with it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time

from dagrl.launcher.connection import Connection, LostError
from dagrl.launcher.errors import LaunchError
from dagrl.launcher.handshake import Hello, prove, shared_token, versions
from dagrl.launcher.job import STOP_AT_ONCE, Job, stop_signals
from dagrl.launcher.ray_node import MEMBER, RayNode, session
from dagrl.orchestrator.cluster.session import small_shared_memory

_CONNECT_TIMEOUT_S, _PAUSE_S, _PROGRESS_S = 5.0, 0.5, 10.0


async def follow(job: Job) -> int:
    follower = _Follower(job)
    try:
        with stop_signals(follower.stop_requested):
            return await follower.follow()
    except LaunchError as error:
        job.note(str(error))
        return error.code


class _Follower:
    def __init__(self, job: Job) -> None:
        self._job = job
        self._who = f"rank {job.node_rank.rank}"
        self._endpoint = job.node_rank.endpoint
        self._connection: Connection | None = None
        self._node: RayNode | None = None
        self._session = contextlib.ExitStack()
        self._error: LaunchError | None = None
        self._work = asyncio.create_task(self._run())

    async def follow(self) -> int:
        try:
            return await self._work
        except asyncio.CancelledError:
            if self._error is None:
                raise
            raise self._error from None

    def stop_requested(self, count: int) -> None:
        if self._connection is None:
            self._fail(f"stopped from {self._who} before the run started", code=130)
        elif count >= STOP_AT_ONCE:
            self._fail(f"stopped at once from {self._who}", code=130)
        else:
            self._job.note("asked rank 0 to stop")
            self._connection.send("stop", count=count)

    def _fail(self, sentence: str, code: int = 1) -> None:
        self._error = self._error or LaunchError(sentence, code)
        self._work.cancel()

    async def _run(self) -> int:
        self._connection = connection = await self._connect()
        try:
            with self._session:
                try:
                    return await self._obey(connection)
                finally:
                    if self._node is not None:
                        await self._node.stop(MEMBER)
        finally:
            # Rank 0 waits for it before it ends Ray's head.
            connection.send("bye")
            await connection.close()

    async def _connect(self) -> Connection:
        """A connection to rank 0, which may start later. LaunchError after the timeout."""
        node_rank, timeout_s = self._job.node_rank, self._job.pipeline.run.start_timeout_s
        start = last_note = time.monotonic()
        while True:
            try:
                return await Connection.open(node_rank.master, node_rank.port, _CONNECT_TIMEOUT_S)
            except socket.gaierror as error:
                why = f"cannot resolve `{node_rank.master}` ({error.strerror})"
            except TimeoutError:
                why = "no answer"
            except OSError as error:
                why = os.strerror(error.errno).lower() if error.errno else str(error)
            now = time.monotonic()
            if now - start > timeout_s:
                raise LaunchError(
                    f"waited {timeout_s:g} s for rank 0 at {self._endpoint}: {why}; is `dagrl launch` running there "
                    "with PET_NODE_RANK=0, and can this machine reach that port?"
                )
            if now - last_note > _PROGRESS_S:
                last_note = now
                self._job.note(f"waiting for rank 0 at {self._endpoint}: {why}; {timeout_s - (now - start):.0f} s left")
            await asyncio.sleep(_PAUSE_S)

    async def _obey(self, connection: Connection) -> int:
        """Execute requests of rank 0, until it sends the exit code."""
        try:
            while True:
                match await connection.recv():
                    case {"kind": "challenge", "challenge": str(challenge)}:
                        connection.send("hello", **self._hello(connection, challenge).model_dump())
                        self._job.note(f"connected to rank 0 at {self._endpoint}, which waits for all machines")
                    case {"kind": "join", "head": str(head), "token": (str() | None) as token}:
                        await self._join(connection, head, token or shared_token(self._job.variables))
                    case {"kind": "end", "code": int(code), "why": why}:
                        if why:
                            self._job.note(str(why))
                        return code
        except LostError as error:
            raise LaunchError(f"lost rank 0 at {self._endpoint}: {error}") from error

    def _hello(self, connection: Connection, challenge: str) -> Hello:
        token = shared_token(self._job.variables)
        return Hello(
            rank=self._job.node_rank.rank,
            nodes=self._job.node_rank.nodes,
            pipeline=self._job.pipeline.name,
            host=socket.gethostname(),
            address=connection.own_address,
            gpus=self._job.machine.gpus,
            cpus=self._job.machine.cpus,
            versions=versions(),
            proof=prove(token, challenge) if token else None,
        )

    async def _join(self, connection: Connection, head: str, token: str | None) -> None:
        if token is None:
            raise LaunchError(
                "rank 0 has a token, but this machine has no token; give all machines the same RAY_AUTH_TOKEN"
            )
        if warning := small_shared_memory():
            self._job.note(warning)
        folder, watch = self._session.enter_context(session(self._job.logs, f"rank{self._job.node_rank.rank}-"))
        self._node = RayNode(folder, self._job.machine, connection.own_address, token, watch)
        self._node.on_exit = self._exited
        await self._node.start_member(head)

    def _exited(self, why: str) -> None:
        if self._connection is not None:
            self._connection.send("failed", why=why)
        self._fail(why)
