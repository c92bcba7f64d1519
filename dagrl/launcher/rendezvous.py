"""The leader's side of the meeting: who has called, who is still there, what they want."""

from __future__ import annotations

import asyncio
from typing import Any

from dagrl.launcher import secret
from dagrl.launcher.connection import LostError, Wire, listen
from dagrl.launcher.errors import LaunchError
from dagrl.launcher.events import Asked, Came, Events, Gone, Member, Wrong
from dagrl.launcher.node_rank import Place
from dagrl.launcher.versions import difference, versions
from dagrl.scheduler.machines import Machine

_FAREWELL_S = 20.0
"""For the others to end what they have, and say so."""


class RollCall:
    """Machines that call at the leader's port. What they do comes to the events."""

    def __init__(self, place: Place, events: Events, shared_secret: str | None, pipeline: str = "") -> None:
        """`pipeline`: the name of the one that is to run, where it is known."""
        self._place = place
        self._pipeline = pipeline
        self._events = events
        self._shared = shared_secret
        self.secret = shared_secret or secret.new_secret()
        """Ray's token."""
        self._server: asyncio.Server | None = None
        self._wires: dict[int, Wire] = {}
        self.members: dict[int, Member] = {}
        """Who is there, by rank; rank 0 is never among them."""
        self._verdict: dict[str, Any] | None = None
        """What everybody is told from now on, once the end has come."""
        self._told = 0
        """Who have called since."""

    @property
    def told_secret(self) -> str | None:
        """What the others have to be told of it: nothing where they have it from the user, as rank 0 has."""
        return None if self._shared is not None else self.secret

    @property
    def missing(self) -> list[int]:
        """Ranks that have not called."""
        return [rank for rank in range(1, self._place.nodes) if rank not in self.members]

    @property
    def met_at(self) -> str:
        """The address of this machine at which the others have found it."""
        return next(iter(self._wires.values())).own_address

    async def open(self, address: str) -> None:
        """Listen from now on."""
        try:
            self._server = await listen(address, self._place.port, self._answer)
        except OSError as error:
            raise LaunchError(
                f"rank 0 cannot listen at {address}:{self._place.port}: {error.strerror}; another program may have the "
                "port: choose another PET_MASTER_PORT for all machines"
            ) from error

    def tell(self, word: str, *, only: int | None = None, **facts: Any) -> None:
        """Say something to all who are there, or to one rank."""
        for rank, wire in self._wires.items():
            if only in (None, rank):
                wire.say(word, **facts)

    async def close(self, code: int, why: str, *, await_missing: bool = False) -> None:
        """Tell all how it has ended, and wait for a while until they have ended too.

        `await_missing`: nobody has had a chance to call yet, so whoever calls meanwhile is told as well.
        """
        self._verdict = {"code": code, "why": why}
        self.tell("end", **self._verdict)
        deadline = asyncio.get_running_loop().time() + _FAREWELL_S
        while (self.members or (await_missing and self._told < self._place.nodes - 1)) and self._left(deadline) > 0:
            await self._events.next(min(0.5, self._left(deadline)))
        if self._server is not None:
            self._server.close()

    def _left(self, deadline: float) -> float:
        return deadline - asyncio.get_running_loop().time()

    async def _answer(self, wire: Wire) -> None:
        """Greet one who calls, and listen to what it says until it hangs up."""
        try:
            member = await self._greet(wire)
        except LostError:
            return
        if member is None:
            return
        self.members[member.rank], self._wires[member.rank] = member, wire
        self._events.put(Came(member))
        why = "it has hung up"
        try:
            while (said := await wire.hear())["word"] != "bye":
                self._take(member, said)
        except LostError as error:
            why = str(error)
        finally:
            del self.members[member.rank], self._wires[member.rank]
            self._events.put(Gone(member, why))

    def _take(self, member: Member, said: dict[str, Any]) -> None:
        match said["word"]:
            case "stop":
                times = said.get("times")
                self._events.put(Asked(member.where, times if type(times) is int else 1))
            case "failed":
                self._events.put(Wrong(f"{member.where}: {said.get('why')}"))

    async def _greet(self, wire: Wire) -> Member | None:
        """Whoever calls, if it belongs here and there is still something to do; else it is told why not."""
        challenged = secret.challenge()
        wire.say("who", challenge=challenged, proves=self._shared is not None)
        hello = await wire.hear()
        refusal, fatal = self._objection(hello, wire, challenged)
        if refusal:
            wire.say("end", code=1, why=refusal)
            if fatal:
                self._events.put(Wrong(refusal))
            return None
        if self._verdict is not None:
            wire.say("end", **self._verdict)
            self._told += 1
            return None
        machine = Machine(f"{hello['host']}, {hello['address']}", hello["gpus"], hello["cpus"])
        return Member(hello["rank"], machine, hello["address"])

    def _objection(self, hello: dict[str, Any], wire: Wire, challenged: str) -> tuple[str, bool]:
        """Why one who calls cannot take part, and whether nobody can then; empty where it can."""
        whole = all(type(hello.get(name)) is int for name in ("rank", "nodes", "gpus", "cpus"))
        texts = all(type(hello.get(name)) is str for name in ("host", "address"))
        if hello["word"] != "hello" or not whole or not texts:
            return "it does not speak as `dagrl launch` does", False
        if self._shared is not None and not secret.proves(hello.get("proof"), self._shared, challenged):
            return (
                f"the token of {hello['host']} ({wire.address}) is not rank 0's, or it has none: give all machines the "
                "same RAY_AUTH_TOKEN"
            ), False
        rank, who = hello["rank"], f"{hello['host']} ({hello['address']})"
        if self._pipeline and hello.get("pipeline") != self._pipeline:
            # Of another job, that has nothing to do with this one.
            said = f"rank 0 at {self._place.meeting} runs the pipeline {self._pipeline}, and {who} wants to run "
            return f"{said}{hello.get('pipeline')}; give each job a PET_MASTER_PORT of its own", False
        if hello["nodes"] != self._place.nodes:
            said = f"PET_NNODES is {hello['nodes']} on {who}, and {self._place.nodes} on rank 0; set the same number"
            return said, True
        if rank in self.members or not 0 < rank < self._place.nodes:
            other = self.members[rank].machine.name if rank in self.members else "rank 0"
            return f"PET_NODE_RANK is {rank} on {who} and on {other}; give each machine a number of its own", True
        if differs := difference(hello.get("versions"), versions()):
            return f"{who} has {differs}; install the same everywhere", True
        return "", False
