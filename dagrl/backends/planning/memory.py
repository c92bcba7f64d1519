"""The memory of an engine on its fullest device and on the host, by kind: the result of every estimate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

GIB = 2**30

Kind = Literal[
    "weights", "gradients", "optimizer", "activations", "logits", "cache", "graphs", "buffers", "allocator", "runtime"
]
KINDS: tuple[Kind, ...] = get_args(Kind)
"""In the order in which they are shown. ``buffers`` are for weight syncs, ``allocator`` is unusable memory between
torch's tensors, ``runtime`` is CUDA's context, kernels, libraries and NCCL."""

CONTEXT = int(0.5 * GIB)
"""Bytes of a GPU that an idle process takes."""


@dataclass(frozen=True, slots=True)
class EngineMemory:
    """Bytes on the fullest GPU of an engine."""

    awake: Mapping[Kind, int]
    """At the peak, by kind."""
    moment: str
    """The time of the peak."""
    weights_alone: int
    """With its weights alone: enough to send or receive them."""
    asleep: int
    at_rest: int | None = None
    """Between its tasks and in a sync, if it stays awake while other engines sleep. Default: as at the peak."""
    host: int = 0
    """Host memory for one rank: offloaded states, the contents of a sleeper, frozen start weights."""
    needs: int | None = None
    """Smallest memory of an engine that fills the memory it is given. Default: its peak."""
    filled_by: str = ""
    """The field that sets how much such an engine fills."""
    notes: tuple[str, ...] = ()

    @property
    def peak(self) -> int:
        return sum(self.awake.values())


def memory_in_worker(
    weights: int, others: Mapping[Kind, int], *, moment: str, on_gpu: bool, sleeps: bool, notes: tuple[str, ...] = ()
) -> EngineMemory:
    """Return the memory of a model inside a worker, whose weights wait on the host while it sleeps."""
    stays = CONTEXT if on_gpu else 0
    awake: dict[Kind, int] = {"weights": weights, **others, "runtime": stays}
    return EngineMemory(awake, moment, weights + stays, stays, host=weights if sleeps else 0, notes=notes)
