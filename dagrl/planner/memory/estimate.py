"""What an engine takes of its fullest GPU and of the host: the result of every estimate, by kind of memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

GIB = 2**30

Kind = Literal[
    "weights", "gradients", "optimizer", "activations", "logits", "cache", "graphs", "buffers", "allocator", "runtime"
]
KINDS: tuple[Kind, ...] = (
    "weights",
    "gradients",
    "optimizer",
    "activations",
    "logits",
    "cache",
    "graphs",
    "buffers",
    "allocator",
    "runtime",
)
"""In the order in which they are shown. ``buffers`` are those of weight syncs, ``allocator`` what torch cannot use
between tensors, ``runtime`` CUDA's context, kernels, libraries and NCCL."""

CONTEXT = int(0.5 * GIB)
"""Of a process that uses a GPU, before it does anything."""


@dataclass(frozen=True, slots=True)
class EngineMemory:
    """Bytes on the fullest GPU of an engine."""

    awake: Mapping[Kind, int]
    """At its peak, by kind."""
    moment: str
    """When that is."""
    weights_alone: int
    """Down to its weights: enough to send or to take them."""
    asleep: int
    host: int = 0
    """Host memory that waits for one rank's device: offloaded states, a sleeper's contents, frozen start weights."""
    needs: int | None = None
    """Of an engine that fills what it is given: the least that it can work with. Default: all that it takes."""
    notes: tuple[str, ...] = field(default=())
    """What is worth knowing: what was assumed."""

    @property
    def peak(self) -> int:
        """All kinds together."""
        return sum(self.awake.values())
