"""The sending side of weight syncs, on one rank of a trainer or in a server's worker."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial, reduce
from typing import Literal

import torch.distributed as dist

from dagrl.weight_sync.channel import Listener, Message
from dagrl.weight_sync.exporter import WeightExporter
from dagrl.weight_sync.protocol import Offer, SendReport
from dagrl.weight_sync.staging import BUFFERS, ReleasableBuffer, Staging, gpu_name, staging_on
from dagrl.weight_sync.transports import (
    ErrorDeferringTransport,
    GroupSetup,
    IpcTransport,
    NcclTransport,
    SyncSession,
    Transport,
)
from dagrl.weight_sync.update_group import UpdateGroup, join_group

TransportName = Literal["cuda_ipc", "broadcast"]


class WeightSender:
    """Sends the weights of an exporter. All ranks of a trainer make the same calls."""

    def __init__(self, exporter: WeightExporter, transport: TransportName, *, host: str, timeout_s: float) -> None:
        """`host` is this machine's address for receivers elsewhere. `timeout_s` bounds every wait for a receiver.

        For a ``broadcast`` rank 0 must own all buckets.
        """
        owners = {bucket.owner for bucket in exporter.manifest.buckets}
        assert transport != "broadcast" or owners <= {0}, f"ranks {sorted(owners)} cannot broadcast their buckets"
        self._exporter, self._transport = exporter, transport
        self._host, self._timeout_s = host, timeout_s
        self._is_root = exporter.process_group is None or exporter.process_group.rank() == 0
        self._listener: Listener | None = None
        self._staging: Staging | None = None
        self._buffers: list[ReleasableBuffer] = []
        self._groups: dict[int, UpdateGroup] = {}
        self._groups_made = 0

    def offer(self) -> Offer | None:
        """The address of this rank for receivers; None if it serves none."""
        if self._transport == "broadcast" and not self._is_root:
            return None
        if self._listener is None:
            self._listener = Listener(self._host if self._transport == "broadcast" else None)
        return Offer(self._listener.address, gpu_name(self._exporter.device) if self._transport == "cuda_ipc" else "")

    def send(self, number: int, waves: Sequence[int], *, passes: int = 1) -> SendReport:
        """Send all weights to this rank's receivers of sync `number`. Collective over the trainer's ranks.

        `waves` holds the number of receivers of each transmission of all weights: the pipeline stages of a generator
        may have to receive one after the other. With 2 `passes` receivers compare the second with the first. Raises
        ValueError if a receiver reports a failure, PeerError if one exits or does not answer. Afterwards the sender
        holds only communicators on the device.
        """
        session = SyncSession(number, self._exporter.manifest, passes, self._timeout_s)
        reports: list[Message] = []
        with self._exporter.exporting():
            for wave, receivers in enumerate(waves):
                with self._open(session, wave, receivers, is_last=wave + 1 == len(waves)) as transport:
                    for _ in range(passes):
                        for index in range(len(session.manifest.buckets)):
                            self._exporter.fill(index, transport.buffer(index))
                            transport.send(index)
                    reports += transport.finish()
        for report in reports:
            if report["error"]:
                raise ValueError(f"{report['who']}: {report['error']}")
        used = [int(report["used"], 16) for report in reports if report.get("used")]
        if not used:
            return SendReport(session.manifest.nbytes, None, ())
        return SendReport(session.manifest.nbytes, reduce(operator.or_, used), tuple(session.manifest.names))

    def disconnect(self) -> None:
        """Destroy the communicators, before the trainer sleeps. The next sync connects again."""
        for group in self._groups.values():
            group.end()
        self._groups = {}

    def close(self) -> None:
        self.disconnect()
        if self._listener is not None:
            self._listener.close()
        self._listener = None

    @contextmanager
    def _open(self, session: SyncSession, wave: int, receivers: int, *, is_last: bool) -> Iterator[Transport]:
        transport = self._make_transport(session, wave, receivers)
        try:
            # Before the last wave, errors are not deferred: later waves would wait for the receiver that was lost.
            # There the other ranks' collectives time out.
            defers = self._exporter.process_group is not None and is_last
            yield ErrorDeferringTransport(transport) if defers else transport
        except BaseException:
            # Members of the group may wait for a broadcast that is never sent, and one in flight may use the buffers.
            if wave in self._groups:
                self._groups.pop(wave).end()
            self._buffers = []
            raise
        finally:
            transport.close()
            for buffer in self._buffers:
                buffer.release()

    def _make_transport(self, session: SyncSession, wave: int, receivers: int) -> Transport:
        if self._transport == "broadcast" and not self._is_root:
            return Transport()
        assert self._listener is not None, "offer before send"
        if self._transport == "cuda_ipc":
            if self._staging is None:
                self._staging = staging_on(self._exporter.device, session.manifest)
            return IpcTransport(session, self._listener, receivers, self._staging, self._exporter.process_group)
        if not self._buffers:
            sizes = session.manifest.buffer_sizes(BUFFERS)
            self._buffers = [ReleasableBuffer(nbytes, self._exporter.device) for nbytes in sizes]
        for buffer in self._buffers:
            buffer.allocate()
        buffers = [buffer.bytes for buffer in self._buffers]
        return NcclTransport(session, self._listener, receivers, buffers, lambda names: self._set_up_group(wave, names))

    def _set_up_group(self, wave: int, names: Sequence[str | None]) -> GroupSetup:
        """The group of the last sync if all receivers are still in it, else a new one."""
        group = self._groups.get(wave)
        if group is not None and all(name == group.name for name in names):
            existing = group
            return {"name": existing.name}, lambda check: existing
        if group is not None:
            self._groups.pop(wave).end()
        # A store per group: a process that still waits in an old group's store would block the new group.
        store = dist.TCPStore(self._host, 0, is_master=True, wait_for_workers=False)
        self._groups_made += 1
        assert self._listener is not None
        name, size = f"{self._listener.address.token[:8]}-{self._groups_made}", len(names) + 1
        make = partial(UpdateGroup, name, store, 0, size, self._exporter.device, self._timeout_s)

        def join(check: Callable[[], None]) -> UpdateGroup:
            self._groups[wave] = join_group(make, self._timeout_s, check)
            return self._groups[wave]

        return {"name": name, "size": size, "host": self._host, "port": store.port}, join
