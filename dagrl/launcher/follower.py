"""What ranks above 0 do: call the leader, run Ray as it says, end when it does."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import Callable

from dagrl.launcher import secret
from dagrl.launcher.connection import LostError, Wire
from dagrl.launcher.errors import LaunchError, StoppedError
from dagrl.launcher.events import PATIENCE, Asked, Ended, Events, Said, Wrong
from dagrl.launcher.job import Job
from dagrl.launcher.ray_node import MEMBER, RayNode, session
from dagrl.launcher.versions import versions
from dagrl.workers.cluster.session import small_shared_memory

_CALL_TIMEOUT_S, _PAUSE_S, _PROGRESS_S = 5.0, 0.5, 10.0


async def follow(job: Job) -> int:
    """The exit code, which is rank 0's where it can be reached."""
    events = Events()
    us = f"rank {job.place.rank}"
    with events.signals(us):
        try:
            wire = await _call(job, events)
            try:
                # Closed before the goodbye: rank 0 waits for it with its own end.
                with contextlib.ExitStack() as stack:
                    return await _Follower(job, events, wire, stack).follow()
            finally:
                wire.say("bye")
                await wire.close()
        except LaunchError as error:
            job.note(str(error))
            return error.code


async def _call(job: Job, events: Events) -> Wire:
    """A connection to rank 0, which may not be there yet; LaunchError where it does not come."""
    place, bound = job.place, job.pipeline.run.start_timeout_s
    begun = told = time.monotonic()
    while True:
        try:
            return await Wire.connect(place.master, place.port, _CALL_TIMEOUT_S)
        except socket.gaierror as error:
            why = f"cannot resolve `{place.master}` ({error.strerror})"
        except TimeoutError:
            why = "no answer"
        except OSError as error:
            why = os.strerror(error.errno).lower() if error.errno else str(error)
        now = time.monotonic()
        if now - begun > bound:
            raise LaunchError(
                f"waited {bound:g} s for rank 0 at {place.meeting}: {why}; is `dagrl launch` running there with "
                "PET_NODE_RANK=0, and may this machine reach that port?"
            )
        if now - told > _PROGRESS_S:
            told = now
            job.note(f"waiting for rank 0 at {place.meeting}: {why}; {bound - (now - begun):.0f} s left")
        if isinstance(event := await events.next(_PAUSE_S), Asked):
            raise StoppedError(event.who)


class _Follower:
    def __init__(self, job: Job, events: Events, wire: Wire, stack: contextlib.ExitStack) -> None:
        self._job = job
        self._events = events
        self._wire = wire
        self._stack = stack
        self._listening = asyncio.create_task(self._listen())
        self._node: RayNode | None = None
        self._watch: Callable[[], None] = lambda: None

    async def follow(self) -> int:
        try:
            while True:
                match await self._events.next():
                    case Said("who", facts):
                        self._introduce(facts)
                    case Said("join", facts):
                        await self._join(facts)
                    case Said("end", facts):
                        if facts.get("why"):
                            self._job.note(str(facts["why"]))
                        return int(facts["code"])
                    case Wrong(sentence):
                        raise LaunchError(sentence)
                    case Ended(name, code):
                        assert self._node is not None, "only a node has processes"
                        why = f"{name} has ended with exit code {code}: {self._node.last_words(name)}"
                        self._wire.say("failed", why=why)
                        raise LaunchError(why)
                    case Asked(who, times) if times >= PATIENCE:
                        raise LaunchError(f"stopped at once from {who}", code=130)
                    case Asked(who, times):
                        self._job.note("asked rank 0 to stop")
                        self._wire.say("stop", times=times)
        finally:
            self._listening.cancel()
            if self._node is not None:
                # Its children have no parent afterwards, and would not be found.
                self._watch()
                await self._node.stop(MEMBER)

    async def _listen(self) -> None:
        place = self._job.place
        try:
            while True:
                said = await self._wire.hear()
                self._events.put(Said(said.pop("word"), said))
        except LostError as error:
            self._events.put(Wrong(f"lost rank 0 at {place.meeting}: {error}"))

    def _introduce(self, asked: dict) -> None:
        machine, own = self._job.machine, secret.shared_secret(self._job.variables)
        self._wire.say(
            "hello",
            rank=self._job.place.rank,
            nodes=self._job.place.nodes,
            pipeline=self._job.pipeline.name,
            host=socket.gethostname(),
            address=self._wire.own_address,
            gpus=machine.gpus,
            cpus=machine.cpus,
            versions=versions(),
            proof=secret.proof(own, str(asked["challenge"])) if own else None,
        )
        self._job.note(f"called rank 0 at {self._job.place.meeting}; it says when all are there")

    async def _join(self, facts: dict) -> None:
        token = facts.get("token") or secret.shared_secret(self._job.variables)
        if token is None:
            raise LaunchError("rank 0 has a token and this machine has none; give all machines the same RAY_AUTH_TOKEN")
        if told := small_shared_memory():
            self._job.note(told)
        folder, self._watch = self._stack.enter_context(session(self._job.logs, f"rank{self._job.place.rank}-"))
        self._node = RayNode(folder, self._job.machine, self._wire.own_address, str(token), self._events)
        await self._node.start_member(str(facts["head"]))
        self._watch()
