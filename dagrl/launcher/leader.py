"""Rank 0: waits for all machines, starts Ray on them, runs `dagrl run`, and ends everything."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

from dagrl.config.errors import counted
from dagrl.launcher.errors import LaunchError
from dagrl.launcher.handshake import shared_token
from dagrl.launcher.job import STOP_AT_ONCE, Job, stop_signals
from dagrl.launcher.node_rank import NodeRank
from dagrl.launcher.ray_node import DRIVER, HEAD, RayNode, session
from dagrl.launcher.rendezvous import Peer, Rendezvous
from dagrl.orchestrator.cluster.session import small_shared_memory
from dagrl.scheduler.machines import MisfitError, assign_machines
from dagrl.scheduler.plan import WorkerId

_PROGRESS_S = 10.0
_LAST_CALL_S = 30.0
"""Time in which no machine has joined, after which a job with fewer than the most begins; torchrun's."""
_LEAVES_AFTER_S = 2.0
"""Time for the stop signals of other machines, which batch systems send to all at once."""
_MAX_NAMED = 16
_SELF = "rank 0"


async def lead(job: Job) -> int:
    """Run the job, and return the exit code of all machines."""
    leader = _Leader(job)
    stopping = stop_signals(lambda count: leader.stop_requested(None, count))
    with stopping, session(job.logs, "rank0-") as (folder, watch):
        return await leader.lead(folder, watch)


async def dismiss(node_rank: NodeRank, code: int, why: str, note: Callable[[str], None]) -> None:
    """End a job that cannot run on all machines that connect within a while."""
    rendezvous = Rendezvous(node_rank, None)
    # The wait has a bound, and the job ends anyway.
    with stop_signals(lambda count: None):
        try:
            await rendezvous.open()
        except LaunchError as error:
            note(str(error))
        else:
            await rendezvous.close(code, why, await_missing=True)


class _Leader(Rendezvous):
    def __init__(self, job: Job) -> None:
        super().__init__(job.node_rank, shared_token(job.variables), job.pipeline.name)
        self._job = job
        self._changed = asyncio.Event()
        self._last_joined = time.monotonic()
        self._error: LaunchError | None = None
        self._node: RayNode | None = None
        self._head = ""
        """Address of Ray's head."""
        self._alive: list[str] = []
        """Addresses of the machines in the Ray cluster."""
        self._is_running = False
        """Whether `dagrl run` runs, which handles the loss of machines itself."""
        self._leaving: set[int] = set()
        """Ranks of the machines that are taken away."""
        self._stops = 0
        """Stop signals that were forwarded to it."""

    async def lead(self, folder: Path, watch: Callable[[], None]) -> int:
        code, why = 1, "rank 0 failed"
        try:
            self._check_range()
            await self.open()
            await self._wait(self._missing_machines)
            self._check_groups()
            self._node = node = RayNode(folder, self._job.machine, self.own_address, self.token, watch)
            node.on_line, node.on_exit = self._head_printed, self.failed
            if warning := small_shared_memory():
                self._job.note(warning)
            await node.start_head()
            await self._wait(self._machines_without_ray, "; can all machines reach all ports of each other?")
            self._job.note(f"Ray is up on {counted(len(self._alive), 'machine')}")
            driver = await node.start_driver(self._head, self._job.arguments)
            if self._error is not None:
                raise self._error
            self._is_running = True
            status = await driver.wait()
            code = status if status >= 0 else 128 - status
            why = f"the run ended with exit code {code}; rank 0 printed the reason" if code else ""
        except LaunchError as error:
            code, why = error.code, str(error)
            self._job.note(why)
        finally:
            # From here on, stop signals have no effect.
            self._is_running = False
            if self._node is not None:
                await self._node.stop(DRIVER)
            # The other machines must leave Ray before its head ends; otherwise they report a failure.
            await self.close(code, why)
            if self._node is not None:
                await self._node.stop(HEAD)
        return code

    def joined(self, peer: Peer) -> None:
        self._job.note(f"{peer} joined")
        self._last_joined = time.monotonic()
        if self._head:
            self.ask_to_join(self._head, peer.rank)
        self._changed.set()

    def left(self, peer: Peer, why: str) -> None:
        if self._node is None or self._is_running:
            self._job.note(f"lost {peer}: {why}; it may join again")
        else:
            self.failed(f"lost {peer}: {why}")
        self._changed.set()

    def stop_requested(self, peer: Peer | None, count: int) -> None:
        who = str(peer or _SELF)
        if peer and count == 1 and self._is_running and self._can_spare(peer):
            self._leaving.add(peer.rank)
            asyncio.get_running_loop().call_later(_LEAVES_AFTER_S, self._let_leave, peer)
        elif not self._is_running or self._node is None:
            self._error = self._error or LaunchError(f"stopped from {who} before the run started", code=130)
            self._changed.set()
        elif count > self._stops:
            # A batch system that cancels a job signals every machine: that counts once.
            self._stops = count
            self._job.note(f"stop requested on {who}")
            self._node.signal_driver(signal.SIGKILL if count >= STOP_AT_ONCE else signal.SIGINT)

    def _let_leave(self, peer: Peer) -> None:
        if self._stops == 0 and self.peers.get(peer.rank) is peer:
            self._job.note(f"{peer} leaves the run")
            self.let_go(peer, "this machine leaves the run, which goes on without it")
        self._leaving.discard(peer.rank)

    def _can_spare(self, peer: Peer) -> bool:
        """Whether the run goes on without a machine, by the places of its workers."""
        pipeline, file = self._job.pipeline, self._job.logs.parent / "workers.json"
        hosts = [other.host for other in self.peers.values()]
        if self._job.node_rank.least == self._job.node_rank.nodes or hosts.count(peer.host) > 1 or not file.is_file():
            return False
        away = {peer.host, *(other.host for other in self.peers.values() if other.rank in self._leaving)}
        left, uses = Counter[str](), set[str]()
        for name, worker in json.loads(file.read_text()).items():
            executor = WorkerId.parse(name).executor
            left[executor] += worker["host"] not in away
            uses |= {executor} if worker["host"] == peer.host else set()
        groups = {name: pipeline.groups[str(pipeline.engines[name].group)] for name in uses & pipeline.engines.keys()}
        return uses == groups.keys() and all(
            group.is_elastic and left[name] >= (group.min_nodes or 0) * group.slots_per_node
            for name, group in groups.items()
        )

    def failed(self, sentence: str) -> None:
        if self._is_running:
            self._job.note(sentence)
        else:
            self._error = self._error or LaunchError(sentence)
            self._changed.set()

    async def _wait(self, subject: Callable[[], str], hint: str = "") -> None:
        """Wait until `subject()` is empty. LaunchError after the timeout, or if the job fails meanwhile."""
        timeout_s = self._job.pipeline.run.start_timeout_s
        deadline = time.monotonic() + timeout_s
        while self._error is None and (waiting := subject()):
            if (left := deadline - time.monotonic()) <= 0:
                raise LaunchError(f"waited {timeout_s:g} s for {waiting}{hint}")
            if not await self._change(min(_PROGRESS_S, left)):
                left = max(0.0, deadline - time.monotonic())
                self._job.note(f"waiting for {waiting}; {left:.0f} s left")
        if self._error is not None:
            raise self._error

    async def _change(self, timeout_s: float) -> bool:
        """Wait for an event; False after the timeout."""
        try:
            await asyncio.wait_for(self._changed.wait(), timeout_s)
        except TimeoutError:
            return False
        self._changed.clear()
        return True

    def _missing_machines(self) -> str:
        missing, node_rank = self.missing, self._job.node_rank
        there, quiet_s = node_rank.nodes - len(missing), time.monotonic() - self._last_joined
        if not missing or (there >= node_rank.least and quiet_s >= _LAST_CALL_S):
            return ""
        connected = [f"{_SELF} ({self._job.machine.name})", *self.peers.values()]
        return (
            f"rank{'s' if len(missing) > 1 else ''} {_listed(missing)} of {node_rank.nodes} machines to connect to "
            f"{node_rank.endpoint} (is `dagrl launch` running there with that PET_MASTER_ADDR, and can it reach the "
            f"port?); connected: {_listed(connected)}"
        )

    def _machines_without_ray(self) -> str:
        if len(self._alive) == 1 + len(self.peers):
            return ""
        own = [] if self._alive else [f"{_SELF} ({self._job.machine.name})"]
        late = [peer for _, peer in sorted(self.peers.items()) if peer.address not in self._alive]
        return f"Ray on {_listed([*own, *late])}"

    def _head_printed(self, line: str) -> None:
        match json.loads(line) if line.startswith("{") else None:
            case {"address": str(address)}:
                self._head = address
                self.ask_to_join(address)
            case {"alive": list(alive)}:
                self._alive = alive
        self._changed.set()

    def _check_range(self) -> None:
        node_rank, groups = self._job.node_rank, self._job.pipeline.groups.values()
        if node_rank.least < node_rank.nodes and not any(group.is_elastic for group in groups):
            raise LaunchError(
                f"PET_NNODES is {node_rank.least}:{node_rank.nodes}, and no group of the pipeline can have fewer "
                "machines; set `min_nodes:` of a group of generators, or a single number",
                code=2,
            )

    def _check_groups(self) -> None:
        machines = [self._job.machine, *(peer.machine for _, peer in sorted(self.peers.items()))]
        try:
            assign_machines(self._job.pipeline.groups, machines)
        except MisfitError as error:
            raise LaunchError(f"{error}; change the groups, PET_NNODES or PET_NPROC_PER_NODE") from error


def _listed(items: Iterable[object]) -> str:
    texts = [str(item) for item in items]
    return ", ".join(texts[:_MAX_NAMED]) + (", ..." if len(texts) > _MAX_NAMED else "")
