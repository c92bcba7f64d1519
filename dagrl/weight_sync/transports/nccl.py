"""Buckets for processes anywhere, by NCCL broadcasts (gloo on CPUs) from the trainer's rank 0."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dagrl.weight_sync.channel import Listener
from dagrl.weight_sync.staging import BUFFERS
from dagrl.weight_sync.transports.base import Clients, SyncSession, Transport, hear
from dagrl.weight_sync.update_group import UpdateGroup, wait_until

type GroupSetup = tuple[dict[str, Any], Callable[[Callable[[], None]], UpdateGroup]]
"""Data that receivers need to join an update group, and a function that waits for them if the group is new. The
function's argument raises when waiting has become pointless."""


class NcclTransport(Transport):
    """Broadcasts buckets. The next one can be filled while one is being sent."""

    def __init__(
        self,
        session: SyncSession,
        listener: Listener,
        receivers: int,
        buffers: Sequence[Tensor],
        set_up_group: Callable[[list[str | None]], GroupSetup],
    ) -> None:
        """`set_up_group` takes the names of the groups that the receivers are in."""
        self._session, self._buffers, self._set_up_group = session, buffers, set_up_group
        self._clients = Clients(listener, receivers, session)
        self._group: UpdateGroup | None = None
        self._works: list[dist.Work | None] = [None] * BUFFERS
        self._given_up = False

    def buffer(self, index: int) -> Tensor:
        slot = index % BUFFERS
        if not self._given_up and (work := self._works[slot]) is not None:
            assert self._group is not None
            self._group.wait(work)
            self._works[slot] = None
        return self._buffers[slot]

    def send(self, index: int) -> None:
        if self._given_up:
            return
        if self._group is None:
            self._group = self._join_group()
        slot = index % BUFFERS
        buffer = self._buffers[slot][: self._session.manifest.buckets[index].nbytes]
        self._works[slot] = self._group.broadcast(buffer)

    def finish(self) -> list[dict[str, Any]]:
        reports = self._clients.reports()
        for slot in range(BUFFERS):
            self.buffer(slot)
        if self._buffers[0].device.type == "cuda":
            done = torch.cuda.current_stream().record_event()
            wait_until(done.query, self._session.timeout_s, "the last broadcast of a weight sync to end on this GPU")
        return reports

    def give_up(self) -> None:
        self._given_up = True
        self._clients.close()

    def close(self) -> None:
        self._clients.close()

    def _join_group(self) -> UpdateGroup:
        message, join = self._set_up_group([hello.get("group") for hello in self._clients.accept()])
        self._clients.greet(lambda index: {"group": {**message, "rank": index + 1}})
        return join(self._check_receivers)

    def _check_receivers(self) -> None:
        """Raise if a receiver has exited or reports a failure early."""
        for channel in self._clients.channels:
            if channel.has_ended:
                hear(channel, 0, "it joined a broadcast")
