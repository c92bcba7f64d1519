"""A process group of one sender and all that take its weights, beside whatever groups those processes have already.

NCCL between GPUs, gloo between CPUs. It is not known to torch.distributed, so it can be ended without anybody's help.
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

_LATER_S = 60.0
"""How much longer NCCL waits than we do: when its own time is over it ends the process."""
_LONGEST_PAUSE_S = 2e-4


class UpdateGroup:
    """One process's share in a group; rank 0 sends."""

    def __init__(self, name: str, store: dist.Store, rank: int, size: int, device: torch.device, timeout_s: float):
        """`name` is of this group alone, in the store that its processes share. Collective on CPUs."""
        self.name, self._rank, self._device = name, rank, device
        timeout = datetime.timedelta(seconds=timeout_s + _LATER_S)
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
        """Connect all its processes, which otherwise happens at the first broadcast. Collective."""
        self.wait(self.broadcast(torch.zeros(1, dtype=torch.uint8, device=self._device)))
        if self._device.type == "cuda":
            torch.cuda.current_stream().synchronize()

    def broadcast(self, tensor: Tensor) -> dist.Work:
        """Begin to send `tensor` from rank 0 into the others'; `wait` is needed before it is used again."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        options.asyncOp = True
        return self._group.broadcast([tensor], options)

    def wait(self, work: dist.Work) -> None:
        """Wait for a broadcast; on a GPU only the current stream does. PeerError where another process has ended."""
        try:
            work.wait()
        except RuntimeError as error:
            reason = first_line(error)
            raise PeerError(f"a broadcast has failed, as a process in it has ended or hangs: {reason}") from error

    def end(self) -> None:
        """End it here and now, whatever the others do."""
        if self._device.type == "cuda":
            self._group.abort()


def join_group(make: Callable[[], UpdateGroup], timeout_s: float, look: Callable[[], None]) -> UpdateGroup:
    """A new group, connected. PeerError where the others do not come in time."""
    made: list[UpdateGroup] = []

    def connect() -> None:
        made.append(make())
        made[0].connect()

    try:
        bounded(connect, timeout_s, "the processes of a weight broadcast to connect", look)
    except BaseException:
        for group in made:
            group.end()
        raise
    return made[0]


def bounded(function: Callable[[], None], timeout_s: float, what: str, look: Callable[[], None]) -> None:
    """Run what may hang in a thread of its own, and wait for it. `look` raises where waiting has become pointless.

    PeerError after `timeout_s`. What hangs is left behind, as it cannot be told to give up.
    """
    failures: list[BaseException] = []
    device = torch.cuda.current_device() if torch.cuda.is_available() else None

    def run() -> None:
        try:
            if device is not None:
                torch.cuda.set_device(device)
            function()
        except BaseException as error:  # noqa: BLE001 - raised below, in the thread that waits
            failures.append(error)

    thread = threading.Thread(target=run, name=what, daemon=True)
    thread.start()
    until(lambda: not thread.is_alive(), timeout_s, what, look)
    if failures:
        raise failures[0]


def until(done: Callable[[], bool], timeout_s: float, what: str, look: Callable[[], None] = lambda: None) -> None:
    """Wait until `done`. PeerError after `timeout_s`; `look` raises where waiting has become pointless."""
    begun = time.monotonic()
    while not done():
        waited = time.monotonic() - begun
        if waited > timeout_s:
            raise PeerError(f"waited {timeout_s:.0f} s for {what}")
        look()
        # Soon at first: most waits are short.
        time.sleep(min(_LONGEST_PAUSE_S, waited / 10 + 2e-5))
