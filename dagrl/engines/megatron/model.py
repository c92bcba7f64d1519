"""Builds the Megatron-core model of an engine, its weights still unset: `hf_weights` fills them.

The only place that knows which of megatron's model classes is used. Works with `families`, which translates the
Hugging Face config, and `fields`, which checks what the user gave. Megatron's parallel state must be initialised.
"""

from __future__ import annotations

import math
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.transformer_config import TransformerConfig

from dagrl.engines.megatron.cpu.modules import use_plain_modules
from dagrl.engines.megatron.families import rope_fields, transformer_fields
from dagrl.engines.megatron.fields import Fixed, join_fields
from dagrl.spec.schema import MegatronEngineSpec, ParallelSpec

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_LARGE_VOCABULARY = 16384


def build_model(hf_config: PretrainedConfig, spec: MegatronEngineSpec) -> list[GPTModel]:
    """Build the rank's model chunks (one, without pipeline parallelism) on the rank's device.

    A chunk takes tokens [1, tokens] with PackedSeqParams and returns logits [1, tokens, padded vocabulary / tp]. The
    columns beyond the vocabulary have logit 0, not minus infinity: leave them out of every softmax. ValueError for what
    the engine cannot build.
    """
    config = transformer_config(hf_config, spec)
    _choose_modules()
    chunk = GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_decoder_block_spec(config, use_transformer_engine=True),
        vocab_size=padded_vocab_size(hf_config.vocab_size, config.tensor_model_parallel_size),
        max_sequence_length=hf_config.max_position_embeddings,
        parallel_output=True,
        share_embeddings_and_output_weights=hf_config.tie_word_embeddings,
        position_embedding_type="rope",
        **rope_fields(hf_config),
    )
    return [chunk]


def transformer_config(hf_config: PretrainedConfig, spec: MegatronEngineSpec) -> TransformerConfig:
    """Megatron's config: the model's fields, the engine's own, and those of ``spec.transformer``.

    Weights and activations are bfloat16 on a GPU and float32 without one, unless ``transformer.bf16`` says otherwise.
    ValueError with a line for each field that is unknown, ill-typed, clashing or not in this version.
    """
    _refuse_later_layouts(spec.parallel)
    _check_sizes(hf_config, spec.parallel)
    on_gpu = torch.cuda.is_available()
    defaults = {
        "bf16": on_gpu,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "apply_rope_fusion": on_gpu,
        "bias_activation_fusion": on_gpu,
    }
    dtype = torch.bfloat16 if spec.transformer.get("bf16", on_gpu) is True else torch.float32
    fixed = (
        Fixed({**transformer_fields(hf_config), "num_moe_experts": None}, "follows from the model"),
        Fixed(_parallel_fields(spec.parallel), "is set by the engine's `parallel` section, where this version has it"),
        Fixed({"params_dtype": dtype, "pipeline_dtype": dtype, "fp16": False}, "follows from `bf16`"),
        Fixed({"calculate_per_token_loss": True}, "makes the loss a mean over the global batch"),
        Fixed({"perform_initialization": False}, "is of no use, as all weights are loaded"),
    )
    fields = join_fields(TransformerConfig, "transformer", spec.transformer, defaults=defaults, fixed=fixed)
    try:
        return TransformerConfig(**fields)
    except (AssertionError, ValueError) as error:
        raise ValueError(f"transformer: Megatron refuses these fields: {error}") from error


def padded_vocab_size(vocab_size: int, tensor_parallel_size: int) -> int:
    """Rows of the embedding: the vocabulary, filled up so that the ranks share it evenly.

    Up to 8 ranks get the same size, so that a checkpoint of one layout loads into another. Large vocabularies are
    filled to what suits matrix units on every rank.
    """
    unit = 1024 if vocab_size >= _LARGE_VOCABULARY else 8
    multiple = math.lcm(unit, tensor_parallel_size)
    return math.ceil(vocab_size / multiple) * multiple


def unwrap(chunk: torch.nn.Module) -> torch.nn.Module:
    """The model within megatron's wrappers (data parallel, and the like)."""
    while isinstance(inner := getattr(chunk, "module", None), torch.nn.Module):
        chunk = inner
    return chunk


def _choose_modules() -> None:
    """Transformer Engine's modules on a GPU, plain ones without it. ValueError for a GPU without Transformer Engine."""
    if not torch.cuda.is_available():
        use_plain_modules()
    elif find_spec("transformer_engine") is None:
        raise ValueError("the megatron engine needs Transformer Engine on a GPU; install transformer-engine[pytorch]")


def _parallel_fields(parallel: ParallelSpec) -> dict[str, int | bool | None]:
    return {**parallel.model_dump(), "virtual_pipeline_model_parallel_size": None, "expert_tensor_parallel_size": None}


def _refuse_later_layouts(parallel: ParallelSpec) -> None:
    for name in ("pipeline_model_parallel_size", "context_parallel_size", "expert_model_parallel_size"):
        if getattr(parallel, name) > 1:
            raise ValueError(f"parallel.{name}: {getattr(parallel, name)} is not in this version yet; leave it at 1")


def _check_sizes(hf_config: PretrainedConfig, parallel: ParallelSpec) -> None:
    ranks = parallel.tensor_model_parallel_size
    if parallel.sequence_parallel and ranks == 1:
        raise ValueError("parallel.sequence_parallel: needs tensor_model_parallel_size above 1; set it to false")
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        size = getattr(hf_config, name)
        if size % ranks:
            raise ValueError(
                f"parallel.tensor_model_parallel_size: {ranks} does not divide the model's {name}, {size}; "
                f"take a divisor of it"
            )
