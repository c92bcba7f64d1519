"""Exports a Megatron model's weights by Hugging Face names, from any layout, in buckets planned once.

`weight_plan` knows the layout, `gather` brings the parts of a bucket to its owner, and `tensor_maps` assembles full
tensors in the caller's buffer. At later syncs this takes a few calls per bucket.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from dagrl.backends.megatron.engine.adapters import adapter_plan
from dagrl.backends.megatron.engine.gather import Gatherer, Merger
from dagrl.backends.megatron.engine.model import unwrap
from dagrl.backends.megatron.engine.weight_plan import PlannedTensor, held_tensors, owner_of, plan
from dagrl.backends.megatron.lora import LoraSpec
from dagrl.weight_sync.copies import CopyPlan, storage_of
from dagrl.weight_sync.manifest import Described, Manifest

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def make_exporter(
    chunks: Sequence[torch.nn.Module],
    hf_config: PretrainedConfig,
    bucket_bytes: int,
    present: Callable[[], AbstractContextManager[None]] = nullcontext,
    *,
    head: str = "lm",
    lora: LoraSpec | None = None,
    by_owner: bool = False,
) -> NativeExporter:
    """An exporter of all weights with adapters merged, or of the tensors that `lora` selects. See `NativeExporter`.

    A tied output layer is omitted.
    """
    config = unwrap(chunks[0]).config
    planned = plan(hf_config, config, head)
    if lora is not None and not lora.merge:
        return NativeExporter(chunks, adapter_plan(planned, config, lora), bucket_bytes, present, by_owner=by_owner)
    return NativeExporter(chunks, planned, bucket_bytes, present, lora, by_owner=by_owner)


class NativeExporter:
    """A `WeightExporter` of the model to which a rank's chunks belong."""

    def __init__(
        self,
        chunks: Sequence[torch.nn.Module],
        planned: Sequence[PlannedTensor],
        bucket_bytes: int,
        present: Callable[[], AbstractContextManager[None]] = nullcontext,
        merge: LoraSpec | None = None,
        *,
        by_owner: bool = False,
    ) -> None:
        """Export the `planned` tensors: the model's own, with the adapters of `merge` added, or all of its adapters.

        Buckets hold whole parameters of Megatron's model, at most `bucket_bytes` unless one is larger. Weights keep
        their dtype. The weights are on the device within the context `present`. Not collective.

        Rank 0 owns all buckets, which do not depend on the layout. With `by_owner` a bucket holds the layers of one
        pipeline stage, or experts of one expert-parallel rank of it, and the first of their ranks owns it.
        """
        self._chunks, self._present, self._planned = chunks, present, planned
        parameter = next(chunks[0].parameters())
        self.device, self.process_group = parameter.device, _group_of_all()
        owned: dict[int, list[PlannedTensor]] = {}
        for tensor in planned:
            owned.setdefault(owner_of(tensor) if by_owner else 0, []).append(tensor)
        groups = {owner: _undivided(tensors, parameter.dtype) for owner, tensors in owned.items()}
        self.manifest = Manifest.cut_by_owner(groups, bucket_bytes)
        self._buckets = _cut_alike(owned, self.manifest)
        self._by_owner = by_owner
        self._lora = merge
        self._adapters = adapter_plan(planned, unwrap(chunks[0]).config, merge) if merge else []
        self._gatherer: Gatherer | None = None
        self._merger: Merger | None = None
        self._held: dict[str, torch.Tensor] = {}
        self._memories: list[int] = []
        self._packs: dict[int, tuple[torch.Tensor, CopyPlan]] = {}

    @contextmanager
    def exporting(self) -> Iterator[None]:
        with self._present():
            gatherer = self._ready()
            gatherer.allocate()
            if self._merger is not None:
                self._merger.allocate()
            try:
                yield
            finally:
                if self.device.type == "cuda":
                    torch.cuda.current_stream().synchronize()
                gatherer.release()
                if self._merger is not None:
                    self._merger.release()

    @torch.no_grad()
    def fill(self, index: int, buffer: torch.Tensor | None) -> None:
        assert self._gatherer is not None, "fill outside of exporting()"
        if self._merger is not None:
            self._merger.merge(index)
        parts = self._gatherer.gather(index)
        if buffer is None or dist.get_rank() != self.manifest.buckets[index].owner:
            return
        known = self._packs.get(index)
        if known is None or known[0] is not buffer:
            known = self._packs[index] = buffer, self._pack(index, parts, buffer)
        known[1].run()

    def _ready(self) -> Gatherer:
        """The gatherer; its plan is valid while the parameters stay in the same memory."""
        memories = [storage_of(tensor) for tensor in self._held.values()]
        if self._gatherer is None or memories != self._memories:
            self._held = held_tensors(self._chunks, self._planned)
            self._memories = [storage_of(tensor) for tensor in self._held.values()]
            sent = self._held
            if self._lora is not None:
                held = held_tensors(self._chunks, self._adapters)
                self._merger = Merger(self._held, held, self._buckets, self._lora)
                sent = self._merger.merged
            self._gatherer = Gatherer(sent, self._buckets, by_owner=self._by_owner)
            self._packs = {}
        return self._gatherer

    def _pack(self, index: int, parts: Sequence[Sequence[torch.Tensor]], buffer: torch.Tensor) -> CopyPlan:
        full = iter(self.manifest.buckets[index].views(buffer))
        pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        for tensor, shards in zip(self._buckets[index], parts, strict=True):
            places = [next(full)[1] for _ in tensor.mapped.hf]
            pairs.extend(tensor.mapped.map.pieces(places, shards))
        return CopyPlan(pairs)


def _group_of_all() -> dist.ProcessGroup | None:
    """Preferably a group that training uses too, because a sleeping engine has to reconnect each group."""
    ranks = dist.get_world_size()
    used = (
        parallel_state.get_tensor_model_parallel_group(),
        parallel_state.get_data_parallel_group(with_context_parallel=True),
    )
    whole = next((group for group in used if group.size() == ranks), dist.group.WORLD)
    return whole if ranks > 1 else None


def _undivided(planned: Sequence[PlannedTensor], dtype: torch.dtype) -> list[list[Described]]:
    """Groups of Hugging Face tensors that must be in one bucket, of a model with parameters of `dtype`."""
    groups: list[list[Described]] = []
    for tensor in planned:
        if not tensor.mapped.with_the_one_before:
            groups.append([])
        names = zip(tensor.mapped.hf, tensor.mapped.shapes, strict=True)
        groups[-1].extend((name, tensor.dtype(dtype), shape) for name, shape in names)
    return groups


def _cut_alike(owned: Mapping[int, Sequence[PlannedTensor]], manifest: Manifest) -> list[list[PlannedTensor]]:
    remaining, buckets = {owner: iter(tensors) for owner, tensors in owned.items()}, []
    for layout in manifest.buckets:
        bucket: list[PlannedTensor] = []
        while sum(len(tensor.mapped.hf) for tensor in bucket) < len(layout.tensors):
            bucket.append(next(remaining[layout.owner]))
        buckets.append(bucket)
    return buckets
