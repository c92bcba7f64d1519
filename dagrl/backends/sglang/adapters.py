"""The low-rank adapters of a trainer as SGLang's one adapter, replaced at each sync."""

from __future__ import annotations

import gc
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dagrl.weight_sync.adapter_loader import Place

if TYPE_CHECKING:
    from sglang.srt.lora.lora_manager import LoRAManager
    from sglang.srt.lora.lora_registry import LoRARef
    from sglang.srt.managers.io_struct import LoRAUpdateOutput

NAME = "policy"
"""Name and id of the adapter."""
LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
"""Layers that a server adapts, by their Hugging Face names."""
_JOINED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""SGLang's joined layers, with their parts in the order of their rows."""
_LAYER = re.compile(r"(.*\blayers\.(\d+)\..*)\.lora_A\.weight")


def adapter_reference() -> LoRARef:
    """SGLang's record of the adapter. Its path is never read."""
    from sglang.srt.lora.lora_registry import LoRARef

    return LoRARef(lora_id=NAME, lora_name=NAME, lora_path="sent-by-the-trainer", pinned=False)


def find_manager() -> LoRAManager:
    """The LoRAManager of a scheduler process. SGLang passes only the model to weight loaders, without a reference to
    the manager.
    """
    from sglang.srt.lora.lora_manager import LoRAManager

    return next(candidate for candidate in gc.get_objects() if type(candidate) is LoRAManager)


class SglangAdapters:
    """`Adapters` of a scheduler process."""

    def __init__(self, manager: LoRAManager, alpha: float) -> None:
        self._manager, self._alpha = manager, alpha

    def take(self, tensors: Mapping[str, Tensor]) -> None:
        """Replace the adapter. Raises ValueError for layers that SGLang does not adapt."""
        from sglang.srt.lora.utils import get_normalized_target_modules

        manager = self._manager
        layers = sorted({name.split(".")[-3] for name in tensors})
        if wrong := sorted(get_normalized_target_modules(layers) - manager.target_modules):
            raise ValueError(f"the server has no adapters of {', '.join(wrong)}; set engines.ACTOR.lora.merge: true")
        rank = next(len(tensor) for name, tensor in tensors.items() if ".lora_A." in name)
        config = {"peft_type": "LORA", "r": rank, "lora_alpha": self._alpha, "target_modules": layers}
        reference = adapter_reference()
        if NAME in manager.lora_refs:
            _raise_unless(manager.unload_lora_adapter(reference))
        _raise_unless(manager.load_lora_adapter_from_tensors(reference, dict(tensors), config))
        # Copied to the memory that the model reads; otherwise the next request would do this.
        manager.fetch_new_loras({NAME})

    def are_placed(self) -> bool:
        """Whether no request without the adapter has taken its slot."""
        return NAME in self._manager.memory_pool.uid_to_buffer_id

    def places(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, list[Place]]:
        """The tensors of these names, as stored by `take`. Raises LookupError for layers of another kind."""
        pool = self._manager.memory_pool
        slot = pool.uid_to_buffer_id[NAME]
        places: dict[str, list[Place]] = {}
        for layer, name, parts in _server_layers(shapes):
            modules = self._manager.lora_modules[layer].items()
            module = next((module for path, module in modules if path.endswith(f".{name}")), None)
            if module is None or name not in pool.A_buffer:
                raise LookupError(f"layer {layer} has no {name} with adapters")
            a, b = pool.A_buffer[name][layer][slot], pool.B_buffer[name][layer][slot]
            rank, width = shapes[f"{parts[0]}.lora_A.weight"]
            heights = [shapes[f"{part}.lora_B.weight"][0] for part in parts]
            # The columns and rows of the whole tensor on this rank.
            columns = module.slice_lora_a_weights(torch.arange(width)[None])[0]
            rows = module.slice_lora_b_weights(torch.arange(sum(heights))[:, None])[:, 0]
            begin = 0
            for index, (part, height) in enumerate(zip(parts, heights, strict=True)):
                into = a[index * rank : (index + 1) * rank, : len(columns)]
                places[f"{part}.lora_A.weight"] = [Place(into, column=int(columns[0]))]
                (own,) = torch.nonzero((rows >= begin) & (rows < begin + height), as_tuple=True)
                into = b[int(own[0]) : int(own[-1]) + 1, :rank]
                places[f"{part}.lora_B.weight"] = [Place(into, row=int(rows[own[0]]) - begin)]
                begin += height
        return places


def _server_layers(names: Mapping[str, object]) -> Iterator[tuple[int, str, list[str]]]:
    """SGLang's adapted layers: number of the model's layer, name, and the paths of the layers that are joined in it."""
    for name in names:
        if (match := _LAYER.fullmatch(name)) is None:
            continue
        prefix, _, last = match[1].rpartition(".")
        joined = next((whole for whole, parts in _JOINED.items() if last in parts), None)
        if joined is None:
            yield int(match[2]), last, [match[1]]
        elif last == _JOINED[joined][0]:
            yield int(match[2]), joined, [f"{prefix}.{part}" for part in _JOINED[joined]]


def _raise_unless(result: LoRAUpdateOutput) -> None:
    if not result.success:
        raise ValueError(f"SGLang did not take the adapters: {result.error_message}")
