"""The pipelines that are measured: random weights, prompts and responses of exact lengths, as mappings for YAML."""

from __future__ import annotations

import json
import string
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from dagrl.data.prompt_file import PromptRow, write_prompts

BYTES = {"kind": "bytes"}
"""A tokenizer that makes a token of each letter, and says its number: prompts are as long as they are meant to be."""

_LEAST_CACHE = 32768
"""Tokens."""


@dataclass(frozen=True, slots=True)
class Load:
    """What a step generates."""

    prompts: int
    n: int
    prompt_tokens: int
    response_tokens: int

    @property
    def samples(self) -> int:
        """Responses of a step."""
        return self.prompts * self.n

    @property
    def row_tokens(self) -> int:
        """Tokens of a prompt and its response."""
        return self.prompt_tokens + self.response_tokens

    @property
    def sampled_tokens(self) -> int:
        """Tokens that a step samples."""
        return self.samples * self.response_tokens


def prompt_texts(load: Load, steps: int) -> list[str]:
    """Prompts of `steps` steps, no two alike: random letters, one token each."""
    letters = np.frombuffer((string.ascii_letters + string.digits).encode(), dtype=np.uint8)
    drawn = np.random.default_rng(5).choice(letters, (steps * load.prompts, load.prompt_tokens))
    return [bytes(row).decode() for row in drawn]


def write_prompt_file(path: Path, load: Load, steps: int) -> Path:
    """The same prompts as a parquet file."""
    rows = (PromptRow("benchmark", text, "0", {"index": index}) for index, text in enumerate(prompt_texts(load, steps)))
    write_prompts(path, rows, {"index": pa.int64()})
    return path


def vllm_arguments(load: Load, model: Path) -> dict[str, Any]:
    """VLLM's engine arguments, the same for the bare server and for dagrl's: as much cache as SGLang has."""
    if not torch.cuda.is_available():
        return {}
    return {
        "kv_cache_memory_bytes": cache_bytes(model) * max(_LEAST_CACHE, load.samples * load.row_tokens * 9 // 8),
        "max_model_len": max(2048, load.row_tokens),
        "max_num_seqs": load.samples,
        # vLLM refuses to start with less free than this share, even where the cache is given in bytes.
        "gpu_memory_utilization": 0.3,
    }


def cache_bytes(model: Path) -> int:
    """Bytes of keys and values of a token, in bfloat16."""
    config = json.loads((model / "config.json").read_text())
    return int(4 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"])


def server_arguments(load: Load) -> dict[str, Any]:
    """SGLang's ServerArgs, the same for the bare server and for dagrl's.

    The cache has room for the tokens of a step and a little more, whatever share of the free memory that is: the rest
    of the GPU belongs to somebody else. Decoding graphs up to the whole step.
    """
    if not torch.cuda.is_available():
        return {}
    return {
        "mem_fraction_static": 0.85,
        "max_total_tokens": max(_LEAST_CACHE, load.samples * load.row_tokens * 9 // 8),
        "max_running_requests": load.samples,
        "cuda_graph_max_bs_decode": load.samples,
    }


def arguments_of(backend: str, load: Load, model: Path) -> dict[str, Any]:
    """The server's arguments for a backend."""
    return vllm_arguments(load, model) if backend == "vllm" else server_arguments(load)


def _generator(backend: str, server: dict[str, Any]) -> dict[str, Any]:
    return {"backend": backend, "server": server} | ({"environment": "vllm"} if backend == "vllm" else {})


def group(gpus: int) -> dict[str, int]:
    """So many GPUs, or as many CPU slots where there are none."""
    return {"gpus_per_node" if torch.cuda.is_available() else "cpus_per_node": gpus}


def rollout_pipeline(
    name: str, model: Path, prompts: Path, load: Load, server: dict[str, Any], backend: str = "sglang"
) -> dict[str, Any]:
    """Nothing but generation, by weights that never move."""
    return {
        "name": name,
        "model": {"path": str(model), "tokenizer": BYTES},
        "data": {
            "train": str(prompts),
            "prompts_per_step": load.prompts,
            "max_prompt_tokens": load.prompt_tokens,
            "order": "file",
        },
        "groups": {"rollout": group(1)},
        "engines": {"generator": _generator(backend, server) | {"group": "rollout"}},
        "nodes": {
            "rollout": {
                "op": "rollout",
                "engine": "generator",
                "n": load.n,
                "sampling": {"temperature": 1.0, "max_new_tokens": load.response_tokens, "ignore_eos": True},
            },
            "reward": {"op": "reward", "fn": "interludes:noise"},
        },
        "run": {"steps": 1_000_000},
    }


def grpo_pipeline(
    name: str,
    model: Path,
    prompts: Path,
    load: Load,
    server: dict[str, Any],
    *,
    apart: bool = False,
    gpus: int = 1,
    sleep: bool = False,
    mini_batch: int | None = None,
    tokens_per_micro_batch: int = 16384,
    backend: str = "sglang",
) -> dict[str, Any]:
    """GRPO without a reference: trainer and generator together on `gpus` GPUs, or apart, each on so many of its own.

    Together they can `sleep` while the other works. With a `mini_batch` the trainer's log-probs of the samples are
    computed first.
    """
    pipeline = rollout_pipeline(name, model, prompts, load, server)
    pipeline["groups"] = {"train": group(gpus), "rollout": group(gpus)} if apart else {"gpu": group(gpus)}
    pipeline["engines"] = {
        "actor": {"backend": "megatron", "group": "train" if apart else "gpu", "optimizer": {"lr": 1e-6}},
        "generator": _generator(backend, server) | {"group": "rollout" if apart else "gpu", "weights_from": "actor"},
    }
    if not apart:
        for engine in pipeline["engines"].values():
            engine["sleep"] = sleep
    budget = {"tokens_per_micro_batch": max(tokens_per_micro_batch, load.row_tokens)}
    if mini_batch:
        pipeline["nodes"]["old"] = {"op": "logprob", "engine": "actor", "write": "old_logprob", **budget}
    pipeline["nodes"] |= {
        "advantage": {"op": "advantage", "estimator": "grpo"},
        "update": {"op": "update", "engine": "actor", **({"mini_batch": mini_batch} if mini_batch else {}), **budget},
    }
    return pipeline
