"""One rank of a trainer, or a server's own worker, as the source of a generator's weights: sync after sync."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
import torch.distributed as dist

from dagrl.weight_sync.channel import Listener
from dagrl.weight_sync.exporter import WeightExporter
from dagrl.weight_sync.links import (
    DeferredErrors,
    GroupSetup,
    IpcTransport,
    NcclTransport,
    NullTransport,
    SyncSession,
    Transport,
)
from dagrl.weight_sync.protocol import Offer, SendReport
from dagrl.weight_sync.releasable_buffer import ReleasableBuffer
from dagrl.weight_sync.staging import BUFFERS, Staging, gpu_name, staging_on
from dagrl.weight_sync.update_group import UpdateGroup, join_group

TransportName = Literal["cuda_ipc", "broadcast"]
"""Whether takers see the sender's memory, or are anywhere."""


class WeightSender:
    """Sends what an exporter has to give. The ranks of a trainer call it alike."""

    def __init__(self, exporter: WeightExporter, reach: TransportName, *, host: str, timeout_s: float) -> None:
        """`host` is this machine's address, for takers far away. Every wait for them has the bound `timeout_s`."""
        self._exporter, self._reach = exporter, reach
        self._host, self._timeout_s = host, timeout_s
        self._is_root = exporter.everyone is None or exporter.everyone.rank() == 0
        self._door: Listener | None = None
        self._staging: Staging | None = None
        self._rooms: list[ReleasableBuffer] = []
        self._groups: dict[int, UpdateGroup] = {}
        self._made = self._waves = 0

    def offer(self) -> Offer | None:
        """Where takers find this rank; None where it has nothing for them."""
        if self._reach == "broadcast" and not self._is_root:
            return None
        if self._door is None:
            self._door = Listener(self._host if self._reach == "broadcast" else None)
        return Offer(self._door.address, gpu_name(self._exporter.device) if self._reach == "cuda_ipc" else "")

    def send(self, number: int, waves: Sequence[int], *, passes: int = 1) -> SendReport:
        """Send all weights to this rank's takers, who ask for sync `number`; collective over the trainer's ranks.

        `waves` has the number of takers that come together, for each time that everything is sent: generators whose
        stages cannot take weights at the same time come one after the other. The last pass of several is to be
        compared. ValueError, with what a taker says, where it could not take the weights; PeerError where one has ended
        or does not answer. Afterwards nothing is held on the device but communicators.
        """
        sync = SyncSession(number, self._exporter.manifest, passes, self._timeout_s)
        self._waves = len(waves)
        reports: list[dict[str, Any]] = []
        with self._exporter.exporting():
            for wave, takers in enumerate(waves):
                with self._link(sync, wave, takers) as link:
                    for _ in range(passes):
                        for index in range(len(sync.manifest.buckets)):
                            self._exporter.fill(index, link.buffer(index))
                            link.send(index)
                    reports += link.finish()
        for report in reports:
            if report["error"]:
                raise ValueError(f"{report['who']}: {report['error']}")
        used = [int(report["used"], 16) for report in reports if report.get("used")]
        if not used:
            return SendReport(sync.manifest.nbytes, None, ())
        return SendReport(sync.manifest.nbytes, functools.reduce(operator.or_, used), tuple(sync.manifest.names))

    def rest(self) -> None:
        """Give up communicators; the next sync connects anew. For a trainer that goes to sleep."""
        for group in self._groups.values():
            group.end()
        self._groups = {}

    def close(self) -> None:
        """Serve nobody any more."""
        self.rest()
        if self._door is not None:
            self._door.close()
        self._door = None

    @contextmanager
    def _link(self, sync: SyncSession, wave: int, takers: int) -> Iterator[Transport]:
        link = self._make_link(sync, wave, takers)
        try:
            # Of several waves the later ones would wait for who is lost: there the others' collectives time out.
            steady = self._exporter.everyone is not None and wave + 1 == self._waves
            yield DeferredErrors(link) if steady else link
        except BaseException:
            # Whoever is in it may wait for what never comes, and what is under way may still use the buffers.
            if wave in self._groups:
                self._groups.pop(wave).end()
            self._rooms = []
            raise
        finally:
            link.close()
            for room in self._rooms:
                room.give_back()

    def _make_link(self, sync: SyncSession, wave: int, takers: int) -> Transport:
        if self._reach == "broadcast" and not self._is_root:
            return NullTransport()
        assert self._door is not None, "offer before send"
        if self._reach == "cuda_ipc":
            if self._staging is None:
                self._staging = staging_on(self._exporter.device, sync.manifest)
            return IpcTransport(sync, self._door, takers, self._staging, self._exporter.everyone)
        if not self._rooms:
            self._rooms = [ReleasableBuffer(nbytes, self._exporter.device) for nbytes in sync.manifest.room(BUFFERS)]
        for room in self._rooms:
            room.take()
        buffers = [room.bytes for room in self._rooms]
        return NcclTransport(sync, self._door, takers, buffers, lambda names: self._meet(wave, names))

    def _meet(self, wave: int, names: Sequence[str | None]) -> GroupSetup:
        """The group of the last sync where all takers are still in it, else a new one."""
        group = self._groups.get(wave)
        if group is not None and all(name == group.name for name in names):
            there = group
            return GroupSetup({"name": there.name}, lambda look: there)
        if group is not None:
            self._groups.pop(wave).end()
        # One of its own for each group: somebody who still waits in another one's would hold it up.
        store = dist.TCPStore(self._host, 0, is_master=True, wait_for_workers=False)
        self._made += 1
        assert self._door is not None
        name, size = f"{self._door.address.token[:8]}-{self._made}", len(names) + 1
        device = torch.device(self._exporter.device)

        def make() -> UpdateGroup:
            return UpdateGroup(name, store, 0, size, device, self._timeout_s)

        def join(look: Callable[[], None]) -> UpdateGroup:
            self._groups[wave] = join_group(make, self._timeout_s, look)
            return self._groups[wave]

        return GroupSetup({"name": name, "size": size, "host": self._host, "port": store.port}, join)
