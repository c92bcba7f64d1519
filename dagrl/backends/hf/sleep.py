"""Weights that leave the device while their engine sleeps: what Hugging Face's models hold beside them is little."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from dagrl.backends.base import SleepReport
from dagrl.backends.device_memory import OffloadableStorages, device_gib_used, storages_of
from dagrl.config.residency import Residency


class SleepingWeights:
    """The weights of one engine, awake at first."""

    def __init__(
        self, parameters: Callable[[], Iterable[torch.Tensor]], *, keep: bool, gib_used_by_others: float
    ) -> None:
        """`keep`: what is in them waits on the host. `gib_used_by_others`: of the device, before they were there."""
        self._part = OffloadableStorages(lambda: storages_of(parameters()), keep=keep, rests_away=False)
        self._gib_used_by_others = gib_used_by_others
        self.asleep = False

    def refuse_asleep(self) -> None:
        """RuntimeError while they are away."""
        if self.asleep:
            raise RuntimeError("the engine sleeps; call wake() before anything else is asked of it")

    def sleep(self, residency: Residency) -> SleepReport:
        """See `GenerateEngine.sleep`: only asleep they give something back."""
        before = device_gib_used()
        if residency is Residency.ASLEEP and not self.asleep:
            self.asleep = True
            self._part.sleep()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return SleepReport(freed_gib=before - device_gib_used(), held_gib=before - self._gib_used_by_others)

    def wake(self, residency: Residency) -> None:
        """See `GenerateEngine.wake`. From any residency to any: to its weights is all the way."""
        if residency is not Residency.ASLEEP and self.asleep:
            self._part.wake()
            self.asleep = False
