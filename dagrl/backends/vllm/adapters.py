"""The low-rank adapters of a trainer as vLLM's one adapter, replaced at each sync."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dagrl.weight_sync.adapter_loader import Place

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.lora.worker_manager import WorkerLoRAManager

RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Values of ``max_lora_rank``."""
_ID = 1


def least_rank(rank: int) -> int:
    """The smallest ``max_lora_rank`` for adapters of `rank`."""
    return next(size for size in RANKS if size >= rank)


def adapter_request() -> LoRARequest:
    """The name of the adapter in a request. Its path is never read: the adapter is loaded before any request."""
    from vllm.lora.request import LoRARequest

    return LoRARequest("policy", _ID, "sent-by-the-trainer")


class VllmAdapters:
    """`Adapters` of a vLLM process."""

    def __init__(self, workers: WorkerLoRAManager, alpha: float) -> None:
        self._workers, self._alpha = workers, alpha
        self._manager = workers._adapter_manager

    def take(self, tensors: Mapping[str, Tensor]) -> None:
        """Replace the adapter. Raises ValueError for layers that vLLM does not adapt."""
        from vllm.lora.lora_model import LoRAModel
        from vllm.lora.peft_helper import PEFTHelper

        manager = self._manager
        packed = manager.packed_modules_mapping
        able = {part for name in manager.supported_lora_modules for part in packed.get(name, [name])}
        layers = {name.split(".")[-3] for name in tensors}
        if wrong := sorted(layers - able):
            raise ValueError(f"vLLM has no adapters of {', '.join(wrong)}; set engines.ACTOR.lora.merge: true")
        rank = next(len(tensor) for name, tensor in tensors.items() if ".lora_A." in name)
        mapper = getattr(manager.model, "hf_to_vllm_mapper", None)
        adapter = LoRAModel.from_lora_tensors(
            _ID,
            dict(tensors),
            PEFTHelper(r=rank, lora_alpha=self._alpha, target_modules=sorted(layers)),
            device="cpu",
            dtype=self._workers.lora_config.lora_dtype,
            weights_mapper=mapper.get_unstacked_mapper() if mapper is not None else None,
        )
        manager.remove_adapter(_ID)
        manager.add_adapter(adapter)
        manager.activate_adapter(_ID)

    def are_placed(self) -> bool:
        """Whether the adapter has a slot."""
        return _ID in self._manager.lora_index_to_id

    def places(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, list[Place]]:
        """The tensors of these names, as stored by `take`. Raises LookupError for layers of another kind."""
        slot = self._manager.lora_index_to_id.index(_ID)
        places: dict[str, list[Place]] = {}
        for path, module in self._manager.modules.items():
            prefix, _, last = path.rpartition(".")
            parts = [f"{prefix}.{part}" for part in self._manager.packed_modules_mapping.get(last, [last])]
            if f"{parts[0]}.lora_A.weight" not in shapes:
                continue
            sizes = [(shapes[f"{part}.lora_A.weight"], shapes[f"{part}.lora_B.weight"]) for part in parts]
            columns = [torch.arange(width)[None] for (_, width), _ in sizes]
            rows = [torch.arange(height)[:, None] for _, (height, _) in sizes]
            if module.tp_size > 1:
                # The columns and rows of the whole tensor on this rank.
                columns = module.slice_lora_a(columns) if len(parts) > 1 else [module.slice_lora_a(columns[0])]
                rows = module.slice_lora_b(rows) if len(parts) > 1 else [module.slice_lora_b(rows[0])]
            for index, part in enumerate(parts):
                rank = sizes[index][0][0]
                own_columns, own_rows = columns[index][0], rows[index][:, 0]
                a = module.lora_a_stacked[index][slot, 0, :rank, : len(own_columns)]
                b = module.lora_b_stacked[index][slot, 0, : len(own_rows), :rank]
                places[f"{part}.lora_A.weight"] = [Place(a, column=int(own_columns[0]))]
                places[f"{part}.lora_B.weight"] = [Place(b, row=int(own_rows[0]), factor=self._alpha / rank)]
        return places
