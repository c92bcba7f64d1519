"""Sizes of published models: enough of their config.json to plan a run where the hub cannot be reached."""

from __future__ import annotations

from typing import Any

_QWEN3 = {"model_type": "qwen3", "vocab_size": 151936, "head_dim": 128, "num_key_value_heads": 8}
_QWEN3_MOE = {
    "model_type": "qwen3_moe",
    "vocab_size": 151936,
    "head_dim": 128,
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
    "max_position_embeddings": 40960,
}
_QWEN25 = {"model_type": "qwen2", "vocab_size": 152064, "max_position_embeddings": 32768}
_LLAMA3 = {"model_type": "llama", "vocab_size": 128256, "num_key_value_heads": 8, "max_position_embeddings": 131072}
_SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")

_CONFIGS: dict[str, dict[str, Any]] = {}
_NAMES: dict[str, str] = {}
"""Name without its organization -> whole name."""


def _add(names: str, base: dict[str, Any], sizes: tuple[int, int, int, int], **more: Any) -> None:
    config = base | dict(zip(_SIZES, sizes, strict=True)) | more
    _CONFIGS.update(dict.fromkeys(names.lower().split(), config))
    _NAMES.update({name.lower().rpartition("/")[2]: name for name in names.split()})


for _name, _sizes, _tied in (
    ("0.6B", (1024, 3072, 28, 16), True),
    ("1.7B", (2048, 6144, 28, 16), True),
    ("4B", (2560, 9728, 36, 32), True),
    ("8B", (4096, 12288, 36, 32), False),
    ("14B", (5120, 17408, 40, 40), False),
    ("32B", (5120, 25600, 64, 64), False),
):
    _names = f"Qwen/Qwen3-{_name} Qwen/Qwen3-{_name}-Base"
    _add(_names, _QWEN3, _sizes, tie_word_embeddings=_tied, max_position_embeddings=40960)
_add("Qwen/Qwen3-30B-A3B Qwen/Qwen3-30B-A3B-Base", _QWEN3_MOE, (2048, 6144, 48, 32), moe_intermediate_size=768)
_add("Qwen/Qwen3-235B-A22B", _QWEN3_MOE, (4096, 12288, 94, 64), moe_intermediate_size=1536)
for _name, _sizes, _groups, _more in (
    ("0.5B", (896, 4864, 24, 14), 2, {"tie_word_embeddings": True, "vocab_size": 151936}),
    ("1.5B", (1536, 8960, 28, 12), 2, {"tie_word_embeddings": True, "vocab_size": 151936}),
    ("3B", (2048, 11008, 36, 16), 2, {"tie_word_embeddings": True, "vocab_size": 151936}),
    ("7B", (3584, 18944, 28, 28), 4, {"tie_word_embeddings": False}),
    ("14B", (5120, 13824, 48, 40), 8, {"tie_word_embeddings": False}),
    ("32B", (5120, 27648, 64, 40), 8, {"tie_word_embeddings": False}),
    ("72B", (8192, 29568, 80, 64), 8, {"tie_word_embeddings": False}),
):
    _names = f"Qwen/Qwen2.5-{_name} Qwen/Qwen2.5-{_name}-Instruct"
    _add(_names, _QWEN25, _sizes, num_key_value_heads=_groups, **_more)
for _name, _sizes, _more in (
    ("3.2-1B", (2048, 8192, 16, 32), {"tie_word_embeddings": True, "head_dim": 64}),
    ("3.2-3B", (3072, 8192, 28, 24), {"tie_word_embeddings": True, "head_dim": 128}),
    ("3.1-8B", (4096, 14336, 32, 32), {"tie_word_embeddings": False}),
    ("3.1-70B", (8192, 28672, 80, 64), {"tie_word_embeddings": False}),
):
    _names = f"meta-llama/Llama-{_name} meta-llama/Llama-{_name}-Instruct"
    _add(_names, _LLAMA3, _sizes, **_more)
_add(
    "HuggingFaceTB/SmolLM2-135M HuggingFaceTB/SmolLM2-135M-Instruct",
    {"model_type": "llama", "vocab_size": 49152, "num_key_value_heads": 3, "max_position_embeddings": 8192},
    (576, 1536, 30, 9),
    tie_word_embeddings=True,
)


def published_config(name: str) -> dict[str, Any] | None:
    """Return the sizes of a model in the fields of its config.json; None for an unknown one."""
    return _CONFIGS.get(name.lower())


def published_name(folder: str) -> str | None:
    """Return the published model that a folder of this name most likely holds: ``Qwen3-8B`` is ``Qwen/Qwen3-8B``."""
    return _NAMES.get(folder.lower())
