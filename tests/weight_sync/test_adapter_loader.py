"""Adapters are handed over whole, and compared with what was sent."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dagrl.weight_sync.adapter_loader import AdapterLoader
from dagrl.weight_sync.manifest import Manifest

SENT = {f"layers.{layer}.q_proj.lora_{side}.weight": torch.randn(4, 6) for layer in range(3) for side in "AB"}


def buckets_of(tensors: dict[str, Tensor]) -> tuple[Manifest, list[Tensor]]:
    manifest = Manifest.cut(([(name, each.dtype, tuple(each.shape))] for name, each in tensors.items()), 200)
    assert len(manifest.buckets) > 1
    buffers = [torch.zeros(layout.nbytes, dtype=torch.uint8) for layout in manifest.buckets]
    for layout, buffer in zip(manifest.buckets, buffers, strict=True):
        for name, place in layout.views(buffer):
            place.copy_(tensors[name])
    return manifest, buffers


def test_what_is_sent_is_handed_over_and_stays_comparable() -> None:
    taken: dict[str, Tensor] = {}

    def take(tensors: dict[str, Tensor]) -> None:
        taken.update({name: tensor.clone() for name, tensor in tensors.items()})
        for tensor in tensors.values():
            tensor.zero_()  # An engine may scale them in place.

    loader = AdapterLoader(take)
    manifest, buffers = buckets_of(SENT)
    assert not loader.knows(manifest)
    loader.begin(manifest)
    for index, buffer in enumerate(buffers):
        loader.load(index, buffer)
        buffer.fill_(0)
    loader.end()
    assert loader.knows(manifest) and loader.used == SENT.keys()
    assert all(torch.equal(taken[name], SENT[name]) for name in SENT)
    changed = SENT | {"layers.1.q_proj.lora_B.weight": torch.zeros(4, 6)}
    for tensors in (SENT, changed):
        loader.begin_comparing()
        for index, buffer in enumerate(buckets_of(tensors)[1]):
            loader.compare(index, buffer)
        if tensors is SENT:
            loader.end_comparing()
    with pytest.raises(ValueError, match=r"layers\.1\.q_proj\.lora_B\.weight"):
        loader.end_comparing()
