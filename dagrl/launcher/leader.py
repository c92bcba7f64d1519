"""What rank 0 does: calls the roll, starts Ray with all, runs the pipeline as `dagrl run` does, ends all."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from pathlib import Path

from dagrl.launcher.addresses import listening_address
from dagrl.launcher.errors import LaunchError, StoppedError
from dagrl.launcher.events import PATIENCE, Asked, Came, Ended, Event, Events, Gone, Printed, Wrong
from dagrl.launcher.job import Job
from dagrl.launcher.node_rank import Place
from dagrl.launcher.ray_node import DRIVER, HEAD, RayNode, session
from dagrl.launcher.rendezvous import RollCall
from dagrl.launcher.secret import shared_secret
from dagrl.scheduler.machines import MisfitError, assign_machines
from dagrl.workers.cluster.session import small_shared_memory

_PROGRESS_S = 10.0
_MOST_NAMED = 16
_US = "rank 0"


async def lead(job: Job) -> int:
    """The exit code of all machines."""
    leader = _Leader(job)
    with leader.events.signals(_US), session(job.logs, "rank0-") as (folder, watch):
        return await leader.lead(folder, watch)


async def dismiss(place: Place, code: int, why: str, note: Callable[[str], None]) -> None:
    """Tell whoever calls within a while that there will be no run."""
    events = Events()
    roll_call = RollCall(place, events, None)
    with events.signals(_US):
        try:
            await roll_call.open(await listening_address(place))
        except LaunchError as error:
            note(str(error))
            return
        await roll_call.close(code, why, await_missing=True)


class _Leader:
    def __init__(self, job: Job) -> None:
        self._job = job
        self.events = Events()
        self._roll_call = RollCall(job.place, self.events, shared_secret(job.variables), job.pipeline.name)

    async def lead(self, folder: Path, watch: Callable[[], None]) -> int:
        code, why = 1, "rank 0 has failed"
        node: RayNode | None = None
        try:
            await self._roll_call.open(await listening_address(self._job.place))
            await self._gather()
            address = self._roll_call.met_at
            node = RayNode(folder, self._job.machine, address, self._roll_call.secret, self.events)
            head = await self._start_ray(node)
            await node.start_driver(head, self._job.arguments)
            watch()
            code = await self._wait_for_driver(node, head)
            why = f"the run has ended with exit code {code}, and rank 0 has printed why" if code else ""
        except LaunchError as error:
            code, why = error.code, str(error)
            self._job.note(why)
        finally:
            watch()
            if node is not None:
                await node.stop(DRIVER)
            # The others leave Ray before its head is gone: that would be a failure to them.
            await self._roll_call.close(code, why)
            if node is not None:
                await node.stop(HEAD)
        return code

    async def _gather(self) -> None:
        """Wait until all have called; LaunchError where one does not, or where the groups do not fit who has."""
        bound = self._job.pipeline.run.start_timeout_s
        deadline = time.monotonic() + bound
        while missing := self._roll_call.missing:
            left = deadline - time.monotonic()
            if left <= 0:
                raise LaunchError(f"waited {bound:g} s for {self._absent(missing)}")
            event = await self.events.next(min(_PROGRESS_S, left))
            match event:
                case None:
                    left = max(0.0, deadline - time.monotonic())
                    self._job.note(f"waiting for {self._absent(missing)}; {left:.0f} s left")
                case Came(member):
                    self._job.note(f"{member.where} is here")
                case Gone(member, why):
                    self._job.note(f"{member.where} had called and is gone: {why}")
                case _:
                    self._common(event)
        self._check_groups()

    def _absent(self, missing: list[int]) -> str:
        """Who has not called, and who has."""
        place = self._job.place
        named = ", ".join(map(str, missing[:_MOST_NAMED])) + (", ..." if len(missing) > _MOST_NAMED else "")
        here = [f"rank 0 ({self._job.machine.name})", *(each.where for each in self._roll_call.members.values())]
        present = ", ".join(here[:_MOST_NAMED]) + (", ..." if len(here) > _MOST_NAMED else "")
        return (
            f"rank{'s' if len(missing) > 1 else ''} {named} of {place.nodes} machines to call at {place.meeting} (is "
            f"`dagrl launch` running there with that PET_MASTER_ADDR, and may it reach the port?); here: {present}"
        )

    def _check_groups(self) -> None:
        machines = [self._job.machine, *(member.machine for _, member in sorted(self._roll_call.members.items()))]
        try:
            assign_machines(self._job.pipeline.groups, machines)
        except MisfitError as error:
            raise LaunchError(f"{error}; change the groups, PET_NNODES or PET_NPROC_PER_NODE") from error

    async def _start_ray(self, node: RayNode) -> str:
        """Ray's address, once all machines have joined it."""
        bound = self._job.pipeline.run.start_timeout_s
        deadline, head = time.monotonic() + bound, ""
        alive: list[str] = []
        if told := small_shared_memory():
            self._job.note(told)
        await node.start_head()
        while len(alive) < self._job.place.nodes:
            left = deadline - time.monotonic()
            if left <= 0:
                raise LaunchError(
                    f"waited {bound:g} s for Ray on {self._without_ray(alive)}; "
                    "may all machines reach all ports of each other?"
                )
            event = await self.events.next(min(_PROGRESS_S, left))
            match event:
                case None:
                    left = max(0.0, deadline - time.monotonic())
                    self._job.note(f"waiting for Ray on {self._without_ray(alive)}; {left:.0f} s left")
                case Printed(line) if line.startswith('{"address"'):
                    head = json.loads(line)["address"]
                    self._ask_to_join(head)
                case Printed(line) if line.startswith('{"alive"'):
                    alive = json.loads(line)["alive"]
                case Gone(member, why):
                    raise LaunchError(f"{member.where} is gone: {why}")
                case Ended(name, code):
                    raise LaunchError(f"{name} has ended with exit code {code}: {node.last_words(name)}")
                case _:
                    self._common(event)
        self._job.note(f"Ray is up on {self._job.place.nodes} machines")
        return head

    def _without_ray(self, alive: list[str]) -> str:
        """The machines whose addresses are not among these."""
        machines = {self._roll_call.met_at: f"rank 0 ({self._job.machine.name})"}
        machines |= {each.address: each.where for _, each in sorted(self._roll_call.members.items())}
        late = [where for address, where in machines.items() if address not in alive]
        return ", ".join(late[:_MOST_NAMED]) + (", ..." if len(late) > _MOST_NAMED else "")

    def _ask_to_join(self, head: str, *, only: int | None = None) -> None:
        self._roll_call.tell("join", only=only, head=head, token=self._roll_call.told_secret)

    async def _wait_for_driver(self, node: RayNode, head: str) -> int:
        """The driver's exit code.

        A machine that is lost is the driver's affair: it goes back to the last checkpoint and waits, so that one that
        was started anew can take its place.
        """
        passed_on = 0
        while True:
            match await self.events.next():
                case Ended(name, code) if name == DRIVER:
                    return code if code >= 0 else 128 - code
                case Ended(name, code):
                    self._job.note(f"{name} has ended with exit code {code}: {node.last_words(name)}")
                case Gone(member, why):
                    self._job.note(f"lost {member.where}: {why}; it may call again")
                case Came(member):
                    self._job.note(f"{member.where} is here again")
                    self._ask_to_join(head, only=member.rank)
                case Wrong(sentence):
                    self._job.note(sentence)
                case Asked(who, times) if times > passed_on:
                    # A whole job that is cancelled is told on every machine: that is still once.
                    passed_on = times
                    self._job.note(f"stop asked for on {who}")
                    # It has a bound for its own end, but no disk has one.
                    node.signal_driver(signal.SIGKILL if times >= PATIENCE else signal.SIGINT)

    def _common(self, event: Event) -> None:
        """What ends everything before the run has begun."""
        match event:
            case Asked(who, _):
                raise StoppedError(who)
            case Wrong(sentence):
                raise LaunchError(sentence)
