"""The low-rank adapters of a trainer as SGLang's one adapter, replaced at each sync."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from typing import Any

from torch import Tensor

NAME = "policy"
"""Name and id of the adapter."""
LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
"""Layers that a server adapts, by their Hugging Face names."""


def adapter_reference() -> Any:
    """SGLang's record of the adapter. Its path is never read."""
    from sglang.srt.lora.lora_registry import LoRARef

    return LoRARef(lora_id=NAME, lora_name=NAME, lora_path="sent-by-the-trainer", pinned=False)


def find_manager() -> Any:
    """The LoRAManager of a scheduler process. SGLang gives weight loaders only the model, which does not name it."""
    from sglang.srt.lora.lora_manager import LoRAManager

    return next(each for each in gc.get_objects() if type(each) is LoRAManager)


def take_adapters(manager: Any, tensors: Mapping[str, Tensor], *, alpha: float) -> None:
    """Replace the adapter of `manager`, a LoRAManager, by `tensors`, in PEFT's names.

    Raises ValueError for adapters that SGLang does not take.
    """
    from sglang.srt.lora.utils import get_normalized_target_modules

    layers = sorted({name.split(".")[-3] for name in tensors})
    if wrong := sorted(get_normalized_target_modules(layers) - manager.target_modules):
        raise ValueError(f"the server has no adapters of {', '.join(wrong)}; set engines.ACTOR.lora.merge: true")
    rank = next(len(tensor) for name, tensor in tensors.items() if ".lora_A." in name)
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "target_modules": layers}
    reference = adapter_reference()
    if NAME in manager.lora_refs:
        _raise_unless(manager.unload_lora_adapter(reference))
    _raise_unless(manager.load_lora_adapter_from_tensors(reference, dict(tensors), config))


def _raise_unless(result: Any) -> None:
    if not result.success:
        raise ValueError(f"SGLang did not take the adapters: {result.error_message}")
