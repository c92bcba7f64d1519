"""Adapters are handed over whole at first, then written in place where that gives the same; and compared."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from dagrl.weight_sync.adapter_loader import AdapterLoader, Place
from dagrl.weight_sync.manifest import Manifest

NAMES = [f"layers.{layer}.q_proj.lora_{side}.weight" for layer in range(3) for side in "AB"]
LAST = NAMES[-1]


class Engine:
    """Keeps columns 2 to 5 of each tensor, and rows of A in two places; doubles B."""

    def __init__(self, *, knows_places: bool = True, shifted: int = 0) -> None:
        self.memory = {name: torch.zeros(4, 3) for name in NAMES}
        self.taken = 0
        self.placed = True
        self._knows_places, self._shifted = knows_places, shifted

    def take(self, tensors: Mapping[str, Tensor]) -> None:
        self.taken += 1
        for name, tensor in tensors.items():
            self.memory[name].copy_(tensor[:, 2:5] * (2 if ".lora_B." in name else 1))
            tensor.zero_()  # An engine may scale them in place.

    def places(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, list[Place]]:
        if not self._knows_places:
            raise LookupError("a layer of another kind")
        assert shapes == dict.fromkeys(NAMES, (4, 6))
        column = 2 + self._shifted
        found = {}
        for name, memory in self.memory.items():
            if ".lora_B." in name:
                found[name] = [Place(memory, column=column, factor=2.0)]
            else:
                found[name] = [Place(memory[:1], column=column), Place(memory[1:], row=1, column=column)]
        return found

    def are_placed(self) -> bool:
        return self.placed


def sent() -> dict[str, Tensor]:
    return {name: torch.randn(4, 6) for name in NAMES}


def sync(loader: AdapterLoader, tensors: dict[str, Tensor], passes: int = 1) -> None:
    """Send `tensors` as a sender does, in buffers that it then writes into."""
    manifest = Manifest.cut(([(name, each.dtype, tuple(each.shape))] for name, each in tensors.items()), 250)
    assert len(manifest.buckets) > 1
    loader.begin(manifest)
    for turn in range(passes):
        if turn:
            loader.begin_comparing()
        for index, layout in enumerate(manifest.buckets):
            buffer = torch.zeros(layout.nbytes, dtype=torch.uint8)
            for name, place in layout.views(buffer):
                place.copy_(tensors[name])
            (loader.compare if turn else loader.load)(index, buffer)
            buffer.fill_(0)
        (loader.end_comparing if turn else loader.end)()
    assert loader.knows(manifest) and loader.used == set(NAMES)


def check(engine: Engine, tensors: dict[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        assert torch.equal(engine.memory[name], tensor[:, 2:5] * (2 if ".lora_B." in name else 1)), name


def test_the_engine_takes_the_first_adapters_and_later_ones_are_written_in_place() -> None:
    engine = Engine()
    loader = AdapterLoader(engine)
    for _ in range(3):
        tensors = sent()
        sync(loader, tensors, passes=2)
        check(engine, tensors)
        # The first adapters, and random numbers that show whether the places are right.
        assert engine.taken == 2 and loader.replays


@pytest.mark.parametrize("engine", [Engine(knows_places=False), Engine(shifted=1)], ids=["unknown", "wrong"])
def test_an_engine_whose_places_are_not_known_takes_all(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    loader = AdapterLoader(engine)
    for _ in range(2):
        tensors, before = sent(), engine.taken
        sync(loader, tensors, passes=2)
        check(engine, tensors)
        assert engine.taken > before and not loader.replays
    assert "slow" in caplog.text


def test_adapters_that_lost_their_slot_are_taken_again() -> None:
    engine = Engine()
    loader = AdapterLoader(engine)
    sync(loader, sent())
    engine.placed = False
    tensors = sent()
    sync(loader, tensors)
    check(engine, tensors)
    assert engine.taken == 4


def test_places_are_tried_out_again_after_a_failure() -> None:
    engine = Engine()
    loader = AdapterLoader(engine)
    sync(loader, sent())
    loader.reset()
    assert not loader.replays
    tensors = sent()
    sync(loader, tensors)
    check(engine, tensors)
    assert engine.taken == 4 and loader.replays


@pytest.mark.parametrize("engine", [Engine(knows_places=False), Engine()], ids=["handed over", "in place"])
def test_a_tensor_that_differs_is_named(engine: Engine) -> None:
    loader = AdapterLoader(engine)
    tensors = sent()
    sync(loader, tensors)
    sync(loader, tensors)
    if loader.replays:
        engine.memory[LAST][0, 0] += 1
        changed = tensors
    else:
        changed = tensors | {LAST: torch.zeros(4, 6)}
    assert loader.manifest is not None
    loader.begin_comparing()
    for index, layout in enumerate(loader.manifest.buckets):
        buffer = torch.zeros(layout.nbytes, dtype=torch.uint8)
        for name, place in layout.views(buffer):
            place.copy_(changed[name])
        loader.compare(index, buffer)
    with pytest.raises(ValueError, match=LAST):
        loader.end_comparing()
