"""Buckets for processes on the same machine, which read this process's buffers.

Buffers are shared by CUDA IPC between processes on one GPU, and by a memory file on the CPU.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dagrl.weight_sync.channel import Listener
from dagrl.weight_sync.staging import BUFFERS, Staging
from dagrl.weight_sync.transports.base import Clients, SyncSession, Transport, hear, tell


class IpcTransport(Transport):
    """Each rank of a trainer serves the receivers on its own GPU; a bucket's owner broadcasts it to the others."""

    def __init__(
        self,
        session: SyncSession,
        listener: Listener,
        receivers: int,
        staging: Staging,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        """`group` of all ranks of the trainer; None if there is only one."""
        self._session, self._staging, self._group = session, staging, group
        self._clients = Clients(listener, receivers, session) if receivers else None
        staging.open()
        self._sent = self._acknowledged = 0
        """Buckets that were announced, and those that all receivers have read."""
        self._last_sent = [0] * BUFFERS
        """Per buffer, the value of `_sent` after its last bucket."""

    def buffer(self, index: int) -> Tensor:
        slot = index % BUFFERS
        self._wait_for_acknowledgements(self._last_sent[slot])
        return self._staging.buffers[slot]

    def send(self, index: int) -> None:
        slot = index % BUFFERS
        buffer = self._staging.buffers[slot]
        if self._group is not None:
            bucket = self._session.manifest.buckets[index]
            dist.broadcast(buffer[: bucket.nbytes], bucket.owner, group=self._group)
        if buffer.device.type == "cuda":
            # The receivers' streams do not wait for ours.
            torch.cuda.current_stream().synchronize()
        if self._clients is None:
            return
        if not self._sent:
            self._clients.accept()
            self._clients.greet(lambda _: {"buffers": self._staging.share()})
        for channel in self._clients.channels:
            tell(channel, bucket=index)
        self._sent += 1
        self._last_sent[slot] = self._sent

    def finish(self) -> list[dict[str, Any]]:
        self._wait_for_acknowledgements(self._sent)
        return self._clients.reports() if self._clients else []

    def give_up(self) -> None:
        if self._clients is not None:
            self._clients.close()
            self._clients = None

    def close(self) -> None:
        self.give_up()
        self._staging.close()

    def _wait_for_acknowledgements(self, count: int) -> None:
        while self._clients is not None and self._acknowledged < count:
            for channel in self._clients.channels:
                hear(channel, self._session.timeout_s, "the acknowledgement of a bucket")
            self._acknowledged += 1
