"""What is measured: model shapes, start weights for them, and rows to train on."""

from __future__ import annotations

import fcntl
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dagrl.backends.runtime.initial_weights import weight_source
from dagrl.config.schema import ModelSpec
from dagrl.data.batch import Batch, Column

QWEN3 = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    "rms_norm_eps": 1e-6,
    "vocab_size": 151936,
    "initializer_range": 0.02,
}
_MIXTURE = QWEN3 | {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
}
_8B = QWEN3 | {"hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 32, "num_key_value_heads": 8}
_GATED_DELTA = {
    "model_type": "qwen3_5_text",
    "architectures": ["Qwen3_5ForCausalLM"],
    "max_position_embeddings": 40960,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.02,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "tie_word_embeddings": False,
}
MODELS: dict[str, dict[str, Any]] = {
    "tiny": QWEN3
    | {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 512, "head_dim": 16}
    | {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True},
    "small": QWEN3
    | {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 8, "vocab_size": 32768}
    | {"num_attention_heads": 8, "num_key_value_heads": 4, "tie_word_embeddings": True},
    "1.7b": QWEN3
    | {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28}
    | {"num_attention_heads": 16, "num_key_value_heads": 8, "tie_word_embeddings": True},
    "8b": _8B | {"num_hidden_layers": 36, "tie_word_embeddings": False},
    "8b_12_layers": _8B | {"num_hidden_layers": 12, "tie_word_embeddings": False},
    # Alike but for their layers, a third of those of Qwen3-8B and of Qwen3.5-9B.
    "8b_third": _8B | {"num_hidden_layers": 12, "tie_word_embeddings": False, "vocab_size": 32768},
    "qwen3_5_9b_third": _GATED_DELTA
    | {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 12, "vocab_size": 32768}
    | {"num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 256}
    | {"linear_num_key_heads": 16, "linear_num_value_heads": 32},
    "tiny_qwen3_5": _GATED_DELTA
    | {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "vocab_size": 512, "head_dim": 16}
    | {"num_attention_heads": 4, "num_key_value_heads": 2, "linear_num_key_heads": 2, "linear_num_value_heads": 4},
    "tiny_moe": _MIXTURE
    | {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 512, "head_dim": 16}
    | {"num_attention_heads": 4, "num_key_value_heads": 2, "num_experts": 8, "moe_intermediate_size": 32}
    | {"num_experts_per_tok": 2},
    "small_moe": _MIXTURE
    | {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4, "vocab_size": 8192, "head_dim": 64}
    | {"num_attention_heads": 8, "num_key_value_heads": 4, "num_experts": 16, "moe_intermediate_size": 256}
    | {"num_experts_per_tok": 4},
    "a3b_6_layers": _MIXTURE
    | {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 6}
    | {"num_attention_heads": 32, "num_key_value_heads": 4, "num_experts": 128, "moe_intermediate_size": 768}
    | {"num_experts_per_tok": 8},
}
"""Hugging Face configs of Qwen3's sizes, some of the layers of Qwen3-8B (36) and Qwen3-30B-A3B (48), and small ones."""

_FILE_BYTES = 2**31


@dataclass(frozen=True, slots=True)
class Workload:
    """Rows of equal length, all of whose tokens but the first are the response."""

    row_tokens: int
    rows_per_micro_batch: int
    micro_batches: int

    @property
    def tokens_per_micro_batch(self) -> int:
        """Packed tokens in one forward pass."""
        return self.row_tokens * self.rows_per_micro_batch

    @property
    def rows(self) -> int:
        """Rows of one model replica in one step."""
        return self.rows_per_micro_batch * self.micro_batches

    @property
    def tokens(self) -> int:
        """Tokens of one model replica in one step."""
        return self.row_tokens * self.rows

    def token_ids(self, vocab_size: int, replica: int = 0) -> np.ndarray:
        """Random token ids of one replica's step, int64 [rows, row_tokens]."""
        return np.random.default_rng(17 + replica).integers(0, vocab_size, (self.rows, self.row_tokens))

    def batch(self, vocab_size: int, replica: int = 0) -> Batch:
        """The same as a batch, with the columns of the policy objective."""
        ids = self.token_ids(vocab_size, replica)
        responses = [row[1:] for row in ids]
        random = np.random.default_rng(23 + replica)
        # About what an untrained model says of any token.
        old = [-np.log(vocab_size) + random.normal(0, 0.05, len(row)) for row in responses]
        advantages = [np.full(len(row), random.normal()) for row in responses]
        return Batch(
            np.arange(self.rows) + replica * self.rows,
            {
                "prompt_tokens": Column.ragged([row[:1] for row in ids], "int64"),
                "response_tokens": Column.ragged(responses, "int64"),
                "response_mask": Column.ragged([np.ones(len(row)) for row in responses], "float32"),
                "advantage": Column.ragged(advantages, "float32"),
                "old_logprob": Column.ragged(old, "float32"),
            },
        )


def write_model(folder: Path, config: dict[str, Any]) -> Path:
    """A Hugging Face folder with random bfloat16 weights of a model of this config; one that is whole already stays.

    All matrices are cut from one stream of a few million random numbers: drawing each afresh would take minutes. Of
    several processes that want the same folder at once, one writes it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return _write_model(folder, config)


def _write_model(folder: Path, config: dict[str, Any]) -> Path:
    from safetensors.torch import save_file

    index = folder / "model.safetensors.index.json"
    if index.is_file() and json.loads((folder / "config.json").read_text()) == config:
        return folder
    (folder / "config.json").write_text(json.dumps(config))
    numbers = torch.randn(2**24 + 1, generator=torch.Generator().manual_seed(1))
    stream = numbers.mul_(config["initializer_range"]).bfloat16()
    files: dict[str, str] = {}
    pending: dict[str, torch.Tensor] = {}
    taken = 0
    for name, shape in [*_shapes(config).items(), (None, ())]:
        if name is None or sum(tensor.nbytes for tensor in pending.values()) > _FILE_BYTES:
            file = f"model-{len(set(files.values())):05d}.safetensors"
            save_file(pending, folder / file)
            files |= dict.fromkeys(pending, file)
            pending = {}
        if name is not None:
            pending[name], taken = _cut(stream, shape, taken)
    index.write_text(json.dumps({"weight_map": files}))
    return folder


def _cut(stream: torch.Tensor, shape: tuple[int, ...], taken: int) -> tuple[torch.Tensor, int]:
    """A tensor out of an endless repetition of `stream`, and where the next begins. Norms are 1."""
    if len(shape) == 1:
        return torch.ones(shape, dtype=stream.dtype), taken
    size = torch.Size(shape).numel()
    rolled = stream.roll(-(taken % len(stream)))
    repeated = rolled.repeat(size // len(stream) + 1)[:size]
    return repeated.reshape(shape).contiguous(), taken + size


def _shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """By the names of a checkpoint, which transformers' own modules have no more where there are experts."""
    shape = {name: value for name, value in config.items() if name != "architectures"}
    source = weight_source(ModelSpec.model_validate({"init": shape, "tokenizer": {"kind": "bytes"}}), 0)
    return {name: tuple(source.shape(name)) for name in source.names()}
