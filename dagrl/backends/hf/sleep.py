"""Offloads a Hugging Face model's weights while its engine sleeps."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from dagrl.backends.base import SleepReport
from dagrl.backends.runtime.device_memory import OffloadableStorages, device_gib_used, storages_of
from dagrl.config.residency import Residency


class SleepingWeights:
    """The weights of one engine, initially awake."""

    def __init__(
        self, parameters: Callable[[], Iterable[torch.Tensor]], *, keep: bool, gib_used_by_others: float
    ) -> None:
        """`keep`: offload to the host instead of dropping. `gib_used_by_others`: in use before loading."""
        self._part = OffloadableStorages(lambda: storages_of(parameters()), keep=keep, rests_away=False)
        self._gib_used_by_others = gib_used_by_others
        self.asleep = False

    def refuse_asleep(self) -> None:
        """Raise RuntimeError while the weights are offloaded."""
        if self.asleep:
            raise RuntimeError("the engine sleeps; call wake() first")

    def sleep(self, residency: Residency) -> SleepReport:
        """See `GenerateEngine.sleep`: memory is released only at residency ASLEEP."""
        before = device_gib_used()
        if residency is Residency.ASLEEP and not self.asleep:
            self.asleep = True
            self._part.sleep()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return SleepReport(freed_gib=before - device_gib_used(), held_gib=before - self._gib_used_by_others)

    def wake(self, residency: Residency) -> None:
        """See `GenerateEngine.wake`. Any other residency restores all weights."""
        if residency is not Residency.ASLEEP and self.asleep:
            self._part.wake()
            self.asleep = False
