"""Builds the Megatron-core model of an engine, its weights still unset: `hf_weights` fills them.

The only place that knows which of megatron's model classes is used. Works with `config`. Megatron's parallel state must
be initialised.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.transformer_config import TransformerConfig

from dagrl.backends.families.registry import buildable
from dagrl.backends.megatron.engine.config import transformer_config
from dagrl.backends.megatron.engine.cpu.modules import use_plain_modules
from dagrl.backends.megatron.engine.latent_attention import use_latent_norms
from dagrl.backends.megatron.engine.output import ScalarHead
from dagrl.backends.megatron.engine.provider import provide
from dagrl.backends.megatron.section import MegatronEngineSpec
from dagrl.backends.megatron.vocabulary import padded_vocab_size

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def build_model(hf_config: PretrainedConfig, spec: MegatronEngineSpec) -> list[GPTModel]:
    """Build the rank's model chunks (one, without virtual pipeline stages) on the rank's device.

    A chunk takes tokens [1, tokens] with PackedSeqParams. The last one returns logits [1, tokens, padded vocabulary /
    tp]; the columns beyond the vocabulary have logit 0, not minus infinity: leave them out of every softmax. With a
    value or reward head its ``output_layer`` is a `ScalarHead`. ValueError for what the engine cannot build.
    """
    config = transformer_config(hf_config, spec)
    _choose_modules()
    stages = spec.parallel.virtual_pipeline_model_parallel_size
    return [_chunk(hf_config, spec, config, stage) for stage in (range(stages) if stages else [None])]


def unwrap(chunk: torch.nn.Module) -> torch.nn.Module:
    """The model within megatron's wrappers (data parallel, and the like)."""
    while isinstance(inner := getattr(chunk, "module", None), torch.nn.Module):
        chunk = inner
    return chunk


def _chunk(
    hf_config: PretrainedConfig, spec: MegatronEngineSpec, config: TransformerConfig, virtual_stage: int | None
) -> GPTModel:
    """The layers of one pipeline stage, or of one of its virtual stages."""
    family, fields = buildable(hf_config.to_dict())
    is_first = parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=virtual_stage)
    is_last = parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=virtual_stage)
    tied = hf_config.tie_word_embeddings and spec.head == "lm"
    if family.bridged:
        chunk: GPTModel = provide(config, hf_config, first=is_first, last=is_last, stage=virtual_stage, tied=tied)
    else:
        chunk = _native_chunk(hf_config, config, virtual_stage, is_first, is_last, tied, family.rope_arguments(fields))
    if is_last and spec.head != "lm":
        chunk.output_layer = ScalarHead(config)
    return chunk


def _native_chunk(
    hf_config: PretrainedConfig,
    config: TransformerConfig,
    virtual_stage: int | None,
    is_first: bool,
    is_last: bool,
    tied: bool,
    rope: Mapping[str, Any],
) -> GPTModel:
    return GPTModel(
        config=config,
        transformer_layer_spec=use_latent_norms(
            get_gpt_decoder_block_spec(config, use_transformer_engine=True, vp_stage=virtual_stage)
        ),
        vocab_size=padded_vocab_size(hf_config.vocab_size, config.tensor_model_parallel_size),
        max_sequence_length=hf_config.max_position_embeddings,
        pre_process=is_first,
        post_process=is_last,
        parallel_output=True,
        share_embeddings_and_output_weights=tied,
        position_embedding_type="rope",
        vp_stage=virtual_stage,
        **rope,
    )


def _choose_modules() -> None:
    """Transformer Engine's modules on a GPU, plain ones without it. ValueError for a GPU without Transformer Engine."""
    if not torch.cuda.is_available():
        use_plain_modules()
    elif find_spec("transformer_engine") is None:
        raise ValueError("the megatron engine needs Transformer Engine on a GPU; install transformer-engine[pytorch]")
