"""Builds the Megatron-core model of an engine, its weights still unset: `hf_weights` fills them.

The only module that depends on Megatron's model class. Works with `config`. Megatron's parallel state must be
initialised.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig

from dagrl.backends.families.registry import buildable
from dagrl.backends.megatron.engine.cpu.gated_delta import use_plain_kernels
from dagrl.backends.megatron.engine.cpu.modules import use_plain_modules
from dagrl.backends.megatron.engine.gated_delta import check_kernels, decoder_spec
from dagrl.backends.megatron.engine.output import ScalarHead
from dagrl.backends.megatron.engine.prefix_sharing import share_prefixes
from dagrl.backends.megatron.engine.provider import provide
from dagrl.backends.megatron.engine.vision import VisionGPTModel
from dagrl.backends.megatron.section import MegatronEngineSpec, padded_vocab_size

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def build_model(hf_config: PretrainedConfig, spec: MegatronEngineSpec, config: TransformerConfig) -> list[GPTModel]:
    """Build the rank's model chunks (one, without virtual pipeline stages) on the rank's device, weights unset.

    A chunk takes tokens [1, tokens] with PackedSeqParams. The last one returns logits [1, tokens, padded vocabulary /
    tp]; the columns beyond the vocabulary have logit 0, not minus infinity: leave them out of every softmax. With a
    value or reward head its ``output_layer`` is a `ScalarHead`. `config` is the `transformer_config` of the engine.
    ValueError for models that the engine cannot build.
    """
    _choose_modules()
    if config.experimental_attention_variant is not None:
        check_kernels()
    stages = spec.parallel.vpp
    chunks = [_chunk(hf_config, spec, config, stage) for stage in (range(stages) if stages else [None])]
    for chunk in chunks:
        if spec.prefix_sharing:
            share_prefixes(chunk)
        if "vision" in spec.freeze and isinstance(chunk, VisionGPTModel) and chunk.visual is not None:
            chunk.visual.requires_grad_(False)
    return chunks


def unwrap(chunk: torch.nn.Module) -> torch.nn.Module:
    """The model within megatron's wrappers (data parallel, and the like)."""
    while isinstance(inner := getattr(chunk, "module", None), torch.nn.Module):
        chunk = inner
    return chunk


def _chunk(
    hf_config: PretrainedConfig, spec: MegatronEngineSpec, config: TransformerConfig, virtual_stage: int | None
) -> GPTModel:
    family, fields = buildable(hf_config.to_dict())
    is_first = parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=virtual_stage)
    is_last = parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=virtual_stage)
    tied = hf_config.tie_word_embeddings and spec.head == "lm"
    if family.bridged:
        chunk: GPTModel = provide(config, hf_config, first=is_first, last=is_last, stage=virtual_stage, tied=tied)
    else:
        shape, arguments = family.shape(fields), family.rope_arguments(fields)
        if shape.vision:
            # Images take their places among the embeddings before ranks share the sequence.
            arguments |= {"scatter_embedding_sequence_parallel": False, "hf_config": hf_config}
        chunk = (VisionGPTModel if shape.vision else GPTModel)(
            config=config,
            transformer_layer_spec=decoder_spec(config, virtual_stage),
            vocab_size=padded_vocab_size(shape.vocabulary, config.tensor_model_parallel_size),
            max_sequence_length=fields["max_position_embeddings"],
            pre_process=is_first,
            post_process=is_last,
            parallel_output=True,
            share_embeddings_and_output_weights=tied,
            vp_stage=virtual_stage,
            **{"position_embedding_type": "rope", **arguments},
        )
    if is_last and spec.head != "lm":
        chunk.output_layer = ScalarHead(config)
    if torch.cuda.is_available():
        # Megatron makes routers and the gates of shared experts on the host.
        chunk.cuda()
    return chunk


def _choose_modules() -> None:
    """Transformer Engine's modules on a GPU, plain ones without it. ValueError for a GPU without Transformer Engine."""
    if not torch.cuda.is_available():
        use_plain_modules()
        use_plain_kernels()
    elif find_spec("transformer_engine") is None:
        raise ValueError("the megatron engine needs Transformer Engine on a GPU; install transformer-engine[pytorch]")
