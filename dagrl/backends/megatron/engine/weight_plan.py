"""The parts of the model on each rank, for any layout, known to every rank without communication.

Used by `hf_weights`. Megatron's parallel state must be initialised.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer import MegatronModule
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from dagrl.backends.families.registry import buildable
from dagrl.backends.families.tensor_maps import MappedTensor
from dagrl.backends.families.tensors import model_tensors
from dagrl.backends.families.vision import TOWER
from dagrl.backends.megatron.engine.model import unwrap
from dagrl.backends.megatron.lora import ADAPTER
from dagrl.backends.megatron.section import padded_vocab_size

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_EMBEDDING, _OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_GROUPED_EXPERT = re.compile(r"(mlp\.experts\.linear_fc[12]\.weight)(\d+)")
_GROUPED_ADAPTER = re.compile(r"mlp\.experts\.linear_fc[12]\.adapter\.linear_(in|out)\.weight$")
_SINGLE_EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.(linear_fc[12]\.weight)")


@dataclass(frozen=True, slots=True)
class PlannedTensor:
    """One tensor of the whole model, and its holders."""

    mapped: MappedTensor
    shape: tuple[int, ...]
    """Shape of each rank's part."""
    parts: int
    """Number of ranks that share it; 1 if each holder has all of it."""
    stage: int
    """Pipeline rank of its holders."""
    expert_rank: int | None
    """Expert-parallel rank of its holders; None outside of experts, where all ranks of the stage are holders."""

    def dtype(self, parameters: torch.dtype) -> torch.dtype:
        """Its dtype on every rank of a model whose parameters have the dtype `parameters`."""
        return torch.float32 if self.mapped.buffer else parameters


def plan(hf_config: PretrainedConfig, config: TransformerConfig, head: str) -> list[PlannedTensor]:
    """All tensors of the model in the order of its layers, the same list on every rank."""
    family, fields = buildable(hf_config.to_dict())
    shape = family.shape(fields)
    vocabulary = padded_vocab_size(shape.vocabulary, config.tensor_model_parallel_size)
    return place(model_tensors(shape, vocabulary, head), config)


def place(tensors: Iterable[MappedTensor], config: TransformerConfig) -> list[PlannedTensor]:
    stages = _stages_of_layers(config)
    last = config.pipeline_model_parallel_size - 1
    planned = []
    for mapped in tensors:
        ranks = config.tensor_model_parallel_size if mapped.expert is None else config.expert_tensor_parallel_size or 1
        parts = ranks if mapped.map.split else 1
        outside = 0 if mapped.megatron == _EMBEDDING or mapped.megatron.startswith(TOWER) else last
        stage = outside if mapped.layer is None else stages[mapped.layer]
        expert_rank = None if mapped.expert is None else mapped.expert // _experts_of_a_rank(config)
        shape = mapped.map.shard_shape(mapped.shapes, parts)
        planned.append(PlannedTensor(mapped, shape, parts, stage, expert_rank))
    return planned


def held_tensors(chunks: Sequence[torch.nn.Module], planned: Sequence[PlannedTensor]) -> dict[str, torch.Tensor]:
    """The rank's parts, by the whole model's Megatron names: parameters, and the buffers that are weights.

    `planned` is all of the model, or all of its adapters. The last pipeline stage's copy of a tied embedding is there
    as the output layer.
    """
    of_adapters = bool(planned) and ADAPTER in planned[0].mapped.megatron
    wanted = {tensor.mapped.megatron: tensor for tensor in planned}
    stage = parallel_state.get_pipeline_model_parallel_rank()
    expert_rank = parallel_state.get_expert_model_parallel_rank()
    held: dict[str, torch.Tensor] = {}
    for chunk in chunks:
        for name, tensor, buffer in _named_tensors(unwrap(chunk)):
            if (ADAPTER in name) != of_adapters:
                continue
            if not buffer or (name in wanted and wanted[name].mapped.buffer):
                assert name not in held, f"{name} is in the model twice"
                held[name] = tensor
    own = {
        name for name, tensor in wanted.items() if tensor.stage == stage and tensor.expert_rank in (None, expert_rank)
    }
    is_last = stage == parallel_state.get_pipeline_model_parallel_world_size() - 1
    copies = {_OUTPUT} - wanted.keys() if is_last and not of_adapters else set()
    difference = (held.keys() - copies) ^ own
    assert not difference, f"the tables of this model and the model disagree about {sorted(difference)}"
    for name in own:
        assert tuple(held[name].shape) == wanted[name].shape, f"{name} is {list(held[name].shape)} in the model"
    return held


def local_tensors(
    chunks: Sequence[torch.nn.Module], planned: Sequence[PlannedTensor]
) -> list[tuple[PlannedTensor, torch.Tensor]]:
    """All that this rank holds, each with its place in the plan; a copy of a tied embedding with the embedding's."""
    held = held_tensors(chunks, planned)
    pairs = [(tensor, held.pop(name)) for tensor in planned if (name := tensor.mapped.megatron) in held]
    embedding = planned[0]
    assert embedding.mapped.megatron == _EMBEDDING
    return [*pairs, *((embedding, copy) for copy in held.values())]


def part_of(tensor: PlannedTensor) -> int:
    if tensor.parts == 1:
        return 0
    if tensor.expert_rank is None:
        return parallel_state.get_tensor_model_parallel_rank()
    return parallel_state.get_expert_tensor_parallel_rank()


def owner_of(tensor: PlannedTensor) -> int:
    """The first rank that holds a part of it, by `distributed.RANK_ORDER`, its sender if all owners send at once."""
    ranks_of_stage = dist.get_world_size() // parallel_state.get_pipeline_model_parallel_world_size()
    first = (tensor.expert_rank or 0) * parallel_state.get_expert_tensor_parallel_world_size()
    return int(tensor.stage * ranks_of_stage + first)


def _named_tensors(model: MegatronModule) -> Iterator[tuple[str, torch.Tensor, bool]]:
    """Parameters and buffers (then True) by the whole model's names, independent of the names in this chunk."""
    layers = getattr(model.decoder, "layers", ())
    numbers = [layer.layer_number - 1 for layer in layers]
    first_expert = 0
    if model.config.num_moe_experts:
        first_expert = parallel_state.get_expert_model_parallel_rank() * _experts_of_a_rank(model.config)
    for buffer, named in ((False, model.named_parameters()), (True, model.named_buffers())):
        for name, tensor in named:
            # A layer with an adapter stores the wrapped module under this name.
            name = name.replace(".to_wrap.", ".")
            if layer := _LAYER.fullmatch(name):
                rest = _global_expert(layer[2], first_expert)
                name = f"decoder.layers.{numbers[int(layer[1])]}.{rest}"
            if _GROUPED_ADAPTER.search(name):
                # One parameter holds the adapters of all of the rank's experts.
                yield from ((f"{name}{first_expert + i}", expert, buffer) for i, expert in enumerate(tensor))
            else:
                yield name, tensor, buffer


def _global_expert(name: str, first: int) -> str:
    if match := _GROUPED_EXPERT.fullmatch(name):
        return f"{match[1]}{first + int(match[2])}"
    if match := _SINGLE_EXPERT.fullmatch(name):
        return f"mlp.experts.{match[2]}{first + int(match[1])}"
    return name


def _stages_of_layers(config: TransformerConfig) -> dict[int, int]:
    """Pipeline rank of each layer, by megatron's own rules."""
    size, virtual = config.pipeline_model_parallel_size, config.virtual_pipeline_model_parallel_size
    layout = config.pipeline_model_parallel_layout
    stages: dict[int, int] = {}
    if layout is not None:
        # Megatron's functions cover the calling rank only. Its list is ordered by pipeline rank, then by chunk.
        order = [(stage, chunk) for chunk in range(virtual or 1) for stage in range(size)]
        for stage, chunk in order:
            for _ in range(layout.layout[stage][chunk].count(LayerType.decoder)):
                stages[len(stages)] = stage
        return stages
    for stage in range(size):
        for part in range(virtual) if virtual else [None]:
            first = get_transformer_layer_offset(config, part, stage)
            for layer in range(first, first + get_num_layers_to_build(config, part, stage)):
                stages[layer] = stage
    assert sorted(stages) == list(range(config.num_layers)), f"layers of stages: {stages}"
    return stages


def _experts_of_a_rank(config: TransformerConfig) -> int:
    assert config.num_moe_experts
    return config.num_moe_experts // config.expert_model_parallel_size
