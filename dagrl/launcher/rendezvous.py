"""Rank 0's side of the rendezvous: accepts the other machines, sends them messages, and notices their end."""

from __future__ import annotations

import asyncio
import secrets
import time
from dataclasses import dataclass

from pydantic import ValidationError

from dagrl.launcher.addresses import listening_address
from dagrl.launcher.connection import Connection, LostError, listen
from dagrl.launcher.errors import LaunchError
from dagrl.launcher.handshake import Hello, is_proof, version_difference, versions
from dagrl.launcher.node_rank import NodeRank
from dagrl.scheduler.machines import Machine

_FAREWELL_S = 20.0
"""Time for the other machines to clean up and leave."""
_PAUSE_S = 0.1


@dataclass(frozen=True, slots=True)
class Peer:
    """Rank 0's view of another machine."""

    rank: int
    machine: Machine
    host: str
    address: str

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.machine.name})"


class _RefusedError(Exception):
    """A machine cannot join; `fatal` if the whole job cannot run then."""

    def __init__(self, sentence: str, *, fatal: bool = False) -> None:
        super().__init__(sentence)
        self.fatal = fatal


class Rendezvous:
    """The machines that are connected to rank 0. Subclasses override the four methods that take events."""

    def __init__(self, node_rank: NodeRank, shared_token: str | None, pipeline: str = "") -> None:
        """`pipeline`: the name of the pipeline, if it is known."""
        self._node_rank = node_rank
        self._pipeline = pipeline
        self._shared_token = shared_token
        self.drawn_token = None if shared_token is not None else secrets.token_hex(32)
        """Ray's token, if the machines share none; the others receive it."""
        self._server: asyncio.Server | None = None
        self._connections: dict[int, Connection] = {}
        self.peers: dict[int, Peer] = {}
        """Connected machines by rank, without rank 0."""
        self._verdict: dict[str, object] | None = None
        """The end of the job, once it is known."""
        self._dismissed = 0
        """Machines that connected after the end."""

    def joined(self, peer: Peer) -> None:
        """A machine joined."""

    def left(self, peer: Peer, why: str) -> None:
        """A machine closed its connection, or is lost."""

    def stop_requested(self, peer: Peer | None, count: int) -> None:
        """A machine, None for rank 0, received its `count`-th stop signal."""

    def failed(self, sentence: str) -> None:
        """Called when the job cannot work, with the reason."""

    @property
    def token(self) -> str:
        return self._shared_token or self.drawn_token or ""

    @property
    def missing(self) -> list[int]:
        return [rank for rank in range(1, self._node_rank.nodes) if rank not in self.peers]

    @property
    def own_address(self) -> str:
        """The address under which the others reach this machine."""
        return next(iter(self._connections.values())).own_address

    async def open(self) -> None:
        address = await listening_address(self._node_rank)
        try:
            self._server = await listen(address, self._node_rank.port, self._serve)
        except OSError as error:
            raise LaunchError(
                f"rank 0 cannot listen on {address}:{self._node_rank.port}: {error.strerror}; another program may use "
                "the port: choose another PET_MASTER_PORT for all machines"
            ) from error

    def ask_to_join(self, head: str, rank: int | None = None) -> None:
        """Ask one machine, or all, to join the Ray cluster at `head`."""
        for peer_rank, connection in self._connections.items():
            if rank in (None, peer_rank):
                connection.send("join", head=head, token=self.drawn_token)

    def let_go(self, peer: Peer, why: str) -> None:
        """End the work of one machine, with exit code 0."""
        self._connections[peer.rank].send("end", code=0, why=why)

    async def close(self, code: int, why: str, *, await_missing: bool = False) -> None:
        """Send the end of the job to all machines, and wait a while until they leave.

        `await_missing`: also wait for machines that have not connected yet.
        """
        self._verdict = {"code": code, "why": why}
        for connection in self._connections.values():
            connection.send("end", **self._verdict)
        deadline = time.monotonic() + _FAREWELL_S
        while self.peers or (await_missing and self._dismissed < self._node_rank.nodes - 1):
            if time.monotonic() > deadline:
                break
            await asyncio.sleep(_PAUSE_S)
        if self._server is not None:
            self._server.close()

    async def _serve(self, connection: Connection) -> None:
        """Accept a machine, and receive its messages until it leaves."""
        try:
            peer = await self._accept(connection)
        except LostError:
            return
        except _RefusedError as error:
            connection.send("end", code=1, why=str(error))
            if error.fatal:
                self.failed(str(error))
            return
        if self._verdict is not None:
            connection.send("end", **self._verdict)
            self._dismissed += 1
            return
        self.peers[peer.rank], self._connections[peer.rank] = peer, connection
        self.joined(peer)
        why = "it left"
        try:
            while (message := await connection.recv())["kind"] != "bye":
                match message:
                    case {"kind": "stop", "count": int(count)}:
                        self.stop_requested(peer, count)
                    case {"kind": "failed", "why": sentence}:
                        self.failed(f"{peer}: {sentence}")
        except LostError as error:
            why = str(error)
        finally:
            del self.peers[peer.rank], self._connections[peer.rank]
            if self._verdict is None:
                self.left(peer, why)

    async def _accept(self, connection: Connection) -> Peer:
        challenge = secrets.token_hex(32)
        connection.send("challenge", challenge=challenge)
        try:
            hello = Hello.model_validate(await connection.recv())
        except ValidationError as error:
            raise _RefusedError("it does not speak the protocol of `dagrl launch`") from error
        if self._shared_token is not None and not is_proof(hello.proof, self._shared_token, challenge):
            raise _RefusedError(
                f"the token of {hello.host} ({connection.address}) is not rank 0's, or it has none; give all machines "
                "the same RAY_AUTH_TOKEN"
            )
        self._check(hello)
        return Peer(
            hello.rank, Machine(f"{hello.host}, {hello.address}", hello.gpus, hello.cpus), hello.host, hello.address
        )

    def _check(self, hello: Hello) -> None:
        """Refuse a machine that contradicts the others."""
        own = self._node_rank
        if self._pipeline and hello.pipeline != self._pipeline:
            # Another job, which has nothing to do with this one.
            raise _RefusedError(
                f"rank 0 at {own.endpoint} runs the pipeline {self._pipeline}, and {hello.who} wants to run "
                f"{hello.pipeline}; give each job its own PET_MASTER_PORT"
            )
        if hello.nodes != own.nodes:
            raise _RefusedError(
                f"PET_NNODES is {hello.nodes} on {hello.who}, and {own.nodes} on rank 0; set the same number",
                fatal=True,
            )
        if hello.rank in self.peers or not 0 < hello.rank < own.nodes:
            other = self.peers[hello.rank].machine.name if hello.rank in self.peers else "rank 0"
            raise _RefusedError(
                f"PET_NODE_RANK is {hello.rank} on {hello.who} and on {other}; give each machine its own number",
                fatal=True,
            )
        if differs := version_difference(hello.versions, versions()):
            raise _RefusedError(f"{hello.who} has {differs}; install the same everywhere", fatal=True)
