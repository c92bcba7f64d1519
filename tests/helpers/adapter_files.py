"""A folder of low-rank adapters, as PEFT writes it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from dagrl.backends.families.registry import shape_of
from dagrl.backends.families.tensors import model_tensors
from dagrl.backends.megatron.adapter_folder import CONFIG, PREFIX, WEIGHTS
from dagrl.backends.megatron.lora import LoraSpec, adapters


def write_adapters(folder: Path, model: Mapping[str, Any], lora: Mapping[str, Any], **config: Any) -> None:
    """Random adapters of a `model`, given by its config.json, with one `A` for layers that Megatron fuses."""
    shape, tensors = shape_of(model), dict[str, np.ndarray]()
    spec, random = LoraSpec.model_validate(lora), np.random.default_rng(5)
    for adapter in adapters(model_tensors(shape, shape.vocabulary), spec):
        one = random.normal(size=adapter.a.shapes[0]).astype("f4")
        tensors |= {f"{PREFIX}{name}": one for name in adapter.a.hf}
        for name, size in zip(adapter.b.hf, adapter.b.shapes, strict=True):
            tensors[f"{PREFIX}{name}"] = random.normal(size=size).astype("f4")
    folder.mkdir()
    save_file(tensors, folder / WEIGHTS)
    modules = sorted({name.split(".")[-3] for name in tensors})
    told = {"peft_type": "LORA", "r": spec.rank, "lora_alpha": spec.alpha, "target_modules": modules, "bias": "none"}
    (folder / CONFIG).write_text(json.dumps(told | config))
