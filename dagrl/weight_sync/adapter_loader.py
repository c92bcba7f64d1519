"""Loads low-rank adapters into an inference engine that already has the model's weights.

The first adapters go through the engine's own functions, which slice and join each tensor in Python and keep a copy on
the host. Later ones are copied to the same places in a few calls, if a test with random numbers gives equal results
both ways.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Protocol

import torch
from torch import Tensor

from dagrl.weight_sync.copies import Replay, TracedCopy
from dagrl.weight_sync.manifest import BucketLayout, Manifest
from dagrl.weight_sync.protocol import shortened

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Place:
    """The place of a part of a tensor in an engine."""

    target: Tensor
    """View of the engine's memory, [rows, columns]."""
    row: int = 0
    column: int = 0
    """First row and column of the part."""
    factor: float = 1.0
    """Factor that the engine applies to it."""

    def part(self, tensor: Tensor) -> Tensor:
        """The part of `tensor` that belongs here, a view."""
        rows, columns = self.target.shape
        return tensor[self.row : self.row + rows, self.column : self.column + columns]


class Adapters(Protocol):
    """The adapters of an engine. Tensors have PEFT's names, without ``base_model.model.``."""

    def take(self, tensors: Mapping[str, Tensor]) -> None:
        """Replace the adapters with the engine's own functions, which may keep and change `tensors`.

        Raises ValueError if the engine cannot take them.
        """

    def places(self, shapes: Mapping[str, tuple[int, ...]]) -> Mapping[str, list[Place]]:
        """Places of tensors of these names and shapes after `take`. Raises LookupError if they are unknown."""

    def are_placed(self) -> bool:
        """Whether the adapters are still at these places."""


class AdapterLoader:
    """Loads the adapters of one sync; a `WeightReceiver` uses it like a `WeightLoader`."""

    prefers_own_buffer = True
    """For hundreds of small tensors, a copy is faster than views of another buffer."""

    def __init__(self, adapters: Adapters) -> None:
        self._adapters = adapters
        self._tensors: dict[str, Tensor] = {}
        """Copies of received buckets, if they are not written in place."""
        self._places: Mapping[str, list[Place]] = {}
        self._replays: list[Replay] = []
        """One for each bucket, or none."""
        self._multiplied: dict[float, list[Tensor]] = {}
        """Factor -> the places to which the engine applies it."""
        self._differing: list[str] = []
        self.manifest: Manifest | None = None
        """Manifest of the last adapters."""

    @property
    def used(self) -> frozenset[str]:
        """All names, because the engine refuses unused tensors."""
        return frozenset(self.manifest.names if self.manifest else ())

    @property
    def replays(self) -> bool:
        """Whether the next adapters are copied to the places of the last ones."""
        return bool(self._replays)

    def knows(self, manifest: Manifest) -> bool:
        return self.manifest is not None and self.manifest.digest == manifest.digest

    def begin(self, manifest: Manifest) -> None:
        """Forget the adapters of the previous sync."""
        if not self.knows(manifest) or not self._adapters.are_placed():
            self._replays, self._places = [], {}
        self.manifest, self._tensors = manifest, {}

    def load(self, index: int, buffer: Tensor) -> None:
        """Copy a bucket from `buffer`, uint8 [its bytes or more]; on a GPU, asynchronously on the current stream."""
        assert self.manifest is not None, "load before begin"
        if self._replays:
            self._replays[index].run(buffer)
        else:
            self._tensors |= {name: tensor.clone() for name, tensor in self.manifest.buckets[index].views(buffer)}

    def end(self) -> None:
        """Pass the received adapters to the engine. Raises ValueError if it cannot load them."""
        if self._replays:
            self._multiply()
            return
        self._take(self._tensors)
        try:
            places = self._adapters.places({name: tuple(tensor.shape) for name, tensor in self._tensors.items()})
        except LookupError as error:
            _log.warning("adapters take the engine's own way at each sync, which is slow: %s", error)
            return
        self._learn(places)

    def begin_comparing(self) -> None:
        self._differing = []

    def compare(self, index: int, buffer: Tensor) -> None:
        """Compare a bucket with the engine's tensors, or with the received ones."""
        assert self.manifest is not None, "compare before begin"
        for name, tensor in self.manifest.buckets[index].views(buffer):
            alike = torch.equal(tensor, self._tensors[name]) if not self._replays else self._is_placed(name, tensor)
            if not alike:
                self._differing.append(name)

    def end_comparing(self) -> None:
        """Raise ValueError if any tensor differed."""
        if self._differing:
            raise ValueError(f"the server's adapters differ from those sent, in {shortened(self._differing)}")

    def release_buffers(self) -> None:
        """Drop references to the buffers of the buckets, whose memory is about to be freed."""
        for replay in self._replays:
            replay.release_buffer()

    def reset(self) -> None:
        """After a failure, drop received tensors and the places, which may be untested."""
        self._tensors, self._places, self._replays = {}, {}, []

    def _take(self, tensors: Mapping[str, Tensor]) -> None:
        self._adapters.take({name: tensor.clone() for name, tensor in tensors.items()})

    def _learn(self, places: Mapping[str, list[Place]]) -> None:
        """Write in place from now on, if the results equal those of the engine's own functions."""
        assert self.manifest is not None
        if unknown := self._tensors.keys() - places.keys():
            _log.warning("the engine's places of %s are not known; each sync is slow", shortened(sorted(unknown)))
            return
        replays = [Replay(list(_copies(layout, places))) for layout in self.manifest.buckets]
        all_places = [*chain.from_iterable(places.values())]
        targets = [place.target for place in all_places]
        random = {name: torch.randn_like(tensor) for name, tensor in self._tensors.items()}
        self._take(random)
        expected = [target.clone() for target in targets]
        for target in targets:
            target.zero_()
        self._places, self._replays, self._multiplied = places, replays, {}
        for place in all_places:
            if place.factor != 1:
                self._multiplied.setdefault(place.factor, []).append(place.target)
        self._write(random)
        if all(torch.equal(*pair) for pair in zip(targets, expected, strict=True)):
            self._write(self._tensors)
            self._tensors = {}
            return
        _log.warning("adapters arrive otherwise than by the engine's own way, which each sync takes; it is slow")
        self._places, self._replays = {}, []
        self._take(self._tensors)

    def _write(self, tensors: Mapping[str, Tensor]) -> None:
        assert self.manifest is not None
        for layout, replay in zip(self.manifest.buckets, self._replays, strict=True):
            device = tensors[layout.tensors[0].name].device
            buffer = torch.empty(layout.nbytes, dtype=torch.uint8, device=device)
            for name, view in layout.views(buffer):
                view.copy_(tensors[name])
            replay.run(buffer)
            replay.release_buffer()
        self._multiply()

    def _multiply(self) -> None:
        for factor, targets in self._multiplied.items():
            torch._foreach_mul_(targets, factor)

    def _is_placed(self, name: str, tensor: Tensor) -> bool:
        return all(
            torch.equal(place.target, place.part(tensor).to(place.target.dtype) * place.factor)
            for place in self._places[name]
        )


def _copies(layout: BucketLayout, places: Mapping[str, list[Place]]) -> Iterable[TracedCopy]:
    empty = torch.empty(layout.nbytes, dtype=torch.uint8, device="meta")
    for name, tensor in layout.views(empty):
        for place in places[name]:
            part = place.part(tensor)
            offset = int(part.storage_offset())
            yield TracedCopy(place.target, part.dtype, offset, tuple(part.shape), tuple(part.stride()))
