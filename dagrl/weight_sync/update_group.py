"""A process group of one sender and all of its receivers, separate from any other group of these processes.

NCCL between GPUs, gloo between CPUs. The group is not registered in torch.distributed, so that each process can end it
without the others.
"""

from __future__ import annotations

import datetime
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dagrl.weight_sync.channel import PeerError
from dagrl.weight_sync.protocol import first_line

_NCCL_MARGIN_S = 60.0
"""Added to NCCL's timeout, because NCCL ends the process when it expires."""
_LONGEST_PAUSE_S = 2e-4


class UpdateGroup:
    """A process's membership in a group; rank 0 sends."""

    def __init__(self, name: str, store: dist.Store, rank: int, size: int, device: torch.device, timeout_s: float):
        """`name` is unique to this group in the shared `store`. Collective on CPUs."""
        self.name, self._rank, self._device = name, rank, device
        timeout = datetime.timedelta(seconds=timeout_s + _NCCL_MARGIN_S)
        own = dist.PrefixStore(name, store)
        self._group = dist.ProcessGroup(own, rank, size)
        backend: Any
        if device.type == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            options.global_ranks_in_group, options.group_name = [*range(size)], dist.GroupName(name)
            backend, kind = dist.ProcessGroupNCCL(own, rank, size, options), dist.ProcessGroup.BackendType.NCCL
        else:
            backend, kind = dist.ProcessGroupGloo(own, rank, size, timeout), dist.ProcessGroup.BackendType.GLOO
        self._group._set_default_backend(kind)
        self._group._register_backend(torch.device(device.type), kind, backend)
        backend._set_sequence_number_for_group()

    def connect(self) -> None:
        """Connect all processes, which otherwise happens at the first broadcast. Collective."""
        self.wait(self.broadcast(torch.zeros(1, dtype=torch.uint8, device=self._device)))
        if self._device.type == "cuda":
            torch.cuda.current_stream().synchronize()

    def broadcast(self, tensor: Tensor) -> dist.Work:
        """Begin to send `tensor` from rank 0 to the others; call `wait` before using it again."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        options.asyncOp = True
        return self._group.broadcast([tensor], options)

    def wait(self, work: dist.Work) -> None:
        """Wait for a broadcast; on a GPU, only the current stream waits. Raises PeerError if a member has exited."""
        try:
            work.wait()
        except RuntimeError as error:
            reason = first_line(error)
            raise PeerError(f"a broadcast failed because one of its processes has ended or hangs: {reason}") from error

    def end(self) -> None:
        """End the group in this process at once."""
        if self._device.type == "cuda":
            self._group.abort()


def join_group(make: Callable[[], UpdateGroup], timeout_s: float, check: Callable[[], None]) -> UpdateGroup:
    """Make and connect a group in a thread. `check` raises when waiting has become pointless.

    Raises PeerError if the other processes do not join in time; the thread, which cannot be stopped, is left behind.
    """
    made: list[UpdateGroup] = []
    failures: list[BaseException] = []
    device = torch.cuda.current_device() if torch.cuda.is_available() else None

    def connect() -> None:
        try:
            if device is not None:
                torch.cuda.set_device(device)
            made.append(make())
            made[0].connect()
        except BaseException as error:  # noqa: BLE001 - raised below, in the waiting thread
            failures.append(error)

    what = "the processes of a weight broadcast to connect"
    thread = threading.Thread(target=connect, name=what, daemon=True)
    thread.start()
    try:
        wait_until(lambda: not thread.is_alive(), timeout_s, what, check)
        if failures:
            raise failures[0]
    except BaseException:
        for group in made:
            group.end()
        raise
    return made[0]


def wait_until(done: Callable[[], bool], timeout_s: float, what: str, check: Callable[[], None] = lambda: None) -> None:
    """Wait until `done()`. Raises PeerError after `timeout_s`; `check` raises when waiting has become pointless."""
    begun = time.monotonic()
    while not done():
        waited = time.monotonic() - begun
        if waited > timeout_s:
            raise PeerError(f"waited {timeout_s:.0f} s for {what}")
        check()
        # Short pauses at first, because most waits are short.
        time.sleep(min(_LONGEST_PAUSE_S, waited / 10 + 2e-5))
