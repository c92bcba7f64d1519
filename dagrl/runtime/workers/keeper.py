"""Keeps what generators have made, so that it outlives them: Ray's objects go with the process that has put them.

A worker that may be lost alone hands each block to the keeper on its machine, and names the keeper's copy in what it
tells the driver. The driver has no part in it: what it hears of is safe.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import ray

from dagrl.data.batch import Batch


class Keeper:
    """A process of its own, on one machine."""

    def __init__(self) -> None:
        self._held: dict[int, list[ray.ObjectRef]] = {}

    def keep(self, step: int, committed: int, batch: Batch) -> tuple[ray.ObjectRef]:
        """Keep a block of `step` until some block is told that the step is `committed`."""
        self._held = {held: refs for held, refs in self._held.items() if held > committed}
        ref = ray.put(batch)
        self._held.setdefault(step, []).append(ref)
        return (ref,)


class Keepers:
    """The keepers of a run, by machine; made when they are asked for."""

    def __init__(self, ray: ModuleType) -> None:
        self._ray = ray
        self._actors: dict[str, Any] = {}

    def on(self, machine: str) -> Any:
        """The keeper on a machine, by Ray's id of it."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        if machine not in self._actors:
            home = NodeAffinitySchedulingStrategy(machine, soft=False)
            placed = self._ray.remote(Keeper).options(num_cpus=0, scheduling_strategy=home)
            self._actors[machine] = placed.remote()
        return self._actors[machine]

    def kill(self) -> None:
        """End all of them."""
        for actor in self._actors.values():
            self._ray.kill(actor)
        self._actors = {}
