"""Hands low-rank adapters to an inference engine, which has the model's own weights already."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from dagrl.weight_sync.manifest import Manifest
from dagrl.weight_sync.protocol import shortened


class AdapterLoader:
    """Collects the adapters of one sync; a `WeightReceiver` uses it like a `WeightLoader`."""

    def __init__(self, take: Callable[[Mapping[str, Tensor]], None]) -> None:
        """`take` gets all tensors by PEFT's names, without ``base_model.model.``; it may keep and change them."""
        self._take = take
        self._tensors: dict[str, Tensor] = {}
        self._differing: list[str] = []
        self.manifest: Manifest | None = None
        """Manifest of the last adapters."""

    @property
    def used(self) -> frozenset[str]:
        """All names, as `take` refuses what it cannot use."""
        return frozenset(self._tensors)

    def knows(self, manifest: Manifest) -> bool:
        """Whether adapters with this manifest were loaded last."""
        return self.manifest is not None and self.manifest.digest == manifest.digest

    def begin(self, manifest: Manifest) -> None:
        """Forget the adapters of the sync before."""
        self.manifest, self._tensors = manifest, {}

    def load(self, index: int, buffer: Tensor) -> None:
        """Copy a bucket from `buffer`, uint8 [its bytes or more]."""
        assert self.manifest is not None, "load before begin"
        self._tensors |= {name: tensor.clone() for name, tensor in self.manifest.buckets[index].views(buffer)}

    def end(self) -> None:
        """Hand over what has come. Raises ValueError if the engine cannot take it."""
        self._take({name: tensor.clone() for name, tensor in self._tensors.items()})

    def begin_comparing(self) -> None:
        """Begin a second pass."""
        self._differing = []

    def compare(self, index: int, buffer: Tensor) -> None:
        """Compare a bucket with what was handed over."""
        assert self.manifest is not None, "compare before begin"
        for name, tensor in self.manifest.buckets[index].views(buffer):
            if not torch.equal(tensor, self._tensors[name]):
                self._differing.append(name)

    def end_comparing(self) -> None:
        """Raise ValueError if any tensor was another one."""
        if self._differing:
            raise ValueError(f"the server's adapters differ from those sent, in {shortened(self._differing)}")

    def release_buffers(self) -> None:
        """Does nothing, as the tensors are copies."""

    def reset(self) -> None:
        """Drop what has come, after a failure."""
        self._tensors = {}
