"""Writes Hugging Face folders whose config, weights and tokenizer belong together, without torch.

Import as ``from model_folders import write_model``: pytest's `pythonpath` holds this folder.
"""

import json
import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dagrl.backends.families.registry import shape_of
from dagrl.backends.families.tensors import published_tensors
from dagrl.model_files.tensor_names import OUTPUT, SCORE

Tensors = dict[str, tuple[str, tuple[int, ...]]]
"""Name -> dtype, as safetensors names it, and shape."""

SIZES = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 24,
}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 8}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 8},
    "qwen3_moe": {"head_dim": 8, "num_experts": 4, **_EXPERTS},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v3": {
        **_EXPERTS,
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "q_lora_rank": 8,
        "kv_lora_rank": 8,
        "qk_nope_head_dim": 6,
        "qk_rope_head_dim": 4,
        "v_head_dim": 6,
        "num_key_value_heads": 4,
    },
}
BYTES = {"F32": 4, "BF16": 2, "F16": 2, "F64": 8, "I8": 1, "F8_E4M3": 1, "I32": 4, "I64": 8, "U8": 1, "BOOL": 1}


def whole_config(**fields: Any) -> dict[str, Any]:
    """The config of a small model of the family that `fields` name, with these fields."""
    return {**SIZES, **FAMILIES[fields["model_type"]], **fields}


def tensors_of(config: Mapping[str, Any], head: str = "lm", dtype: str = "BF16") -> Tensors:
    """The tensors that belong to a config."""
    tensors = {name: (dtype, size) for name, size in published_tensors(shape_of(config))}
    if head == "reward":
        tensors.pop(OUTPUT, None)
        tensors[SCORE] = (dtype, (1, config["hidden_size"]))
    return tensors


def write_tensors(path: Path, tensors: Tensors) -> None:
    """A file of safetensors; its weights are zeros that take no room on the disk."""
    header: dict[str, Any] = {}
    end = 0
    for name, (dtype, shape) in tensors.items():
        begin, end = end, end + math.prod(shape) * BYTES[dtype]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)


def write_weights(folder: Path, tensors: Tensors, files: int = 1) -> None:
    """One file, or several with an index."""
    if files == 1:
        write_tensors(folder / "model.safetensors", tensors)
        return
    names = {name: f"model-{1 + at % files:05d}-of-{files:05d}.safetensors" for at, name in enumerate(tensors)}
    for file in sorted(set(names.values())):
        write_tensors(folder / file, {name: tensors[name] for name in tensors if names[name] == file})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))


def write_tokenizer(folder: Path, tokens: Mapping[str, int]) -> None:
    """A tokenizer.json of these tokens."""
    content = {"model": {"type": "BPE", "vocab": dict(tokens), "merges": []}, "added_tokens": []}
    (folder / "tokenizer.json").write_text(json.dumps(content))


def write_model(folder: Path, *, head: str = "lm", **fields: Any) -> dict[str, Any]:
    """A folder with config and weights, without a tokenizer; returns the config. Sizes left out are small ones."""
    config = whole_config(**fields)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    write_weights(folder, tensors_of(config, head))
    return config
