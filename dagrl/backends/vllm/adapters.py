"""The low-rank adapters of a trainer as vLLM's one adapter, replaced at each sync."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Values of ``max_lora_rank``."""
_ID = 1


def least_rank(rank: int) -> int:
    """The smallest ``max_lora_rank`` for adapters of `rank`."""
    return next(each for each in RANKS if each >= rank)


def adapter_request() -> Any:
    """The name of the adapter in a request. Its path is never read: the adapter is there before any request."""
    from vllm.lora.request import LoRARequest

    return LoRARequest("policy", _ID, "sent-by-the-trainer")


def take_adapters(workers: Any, tensors: Mapping[str, Tensor], *, alpha: float) -> None:
    """Replace the adapter of `workers`, a vLLM process's WorkerLoRAManager, by `tensors`, in PEFT's names.

    Raises ValueError for layers that vLLM does not adapt.
    """
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.peft_helper import PEFTHelper

    manager = workers._adapter_manager
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
        PEFTHelper(r=rank, lora_alpha=alpha, target_modules=sorted(layers)),
        device="cpu",
        dtype=workers.lora_config.lora_dtype,
        weights_mapper=mapper.get_unstacked_mapper() if mapper is not None else None,
    )
    manager.remove_adapter(_ID)
    manager.add_adapter(adapter)
    manager.activate_adapter(_ID)
