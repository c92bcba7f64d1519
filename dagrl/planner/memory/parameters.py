"""Parameters that one rank of a Megatron engine holds, exactly: what weights, gradients and optimizer follow from."""

from __future__ import annotations

from dataclasses import dataclass

from dagrl.backends.families.shape import ModelShape
from dagrl.backends.megatron.section import MegatronEngineSpec
from dagrl.backends.megatron.vocabulary import padded_vocab_size
from dagrl.planner.memory.stages import Stage


@dataclass(frozen=True, slots=True)
class RankParameters:
    """Counts on one rank. The optimizer shares each kind out over the ranks that hold the same of it."""

    dense: int
    """All but routed experts: shared by data- and context-parallel ranks."""
    experts: int
    """Of routed experts: shared by expert-data-parallel ranks."""
    largest: int
    """The largest single one."""

    @property
    def total(self) -> int:
        """All of them."""
        return self.dense + self.experts


def rank_parameters(shape: ModelShape, engine: MegatronEngineSpec, stage: Stage) -> RankParameters:
    """What each rank of a pipeline stage holds; ranks of one stage hold equally much."""
    sizes = engine.parallel
    tensor = sizes.tensor_model_parallel_size
    expert_ranks = sizes.expert_model_parallel_size * sizes.expert_tensor_parallel_size
    dense = experts = largest = 0
    for index in stage.layers:
        layer = shape.layer(index)
        dense += (layer.attention + layer.mlp) // tensor + layer.whole
        experts += layer.experts // expert_ranks
        largest = max(largest, layer.attention // 2 // tensor, 2 * layer.mlp // 3 // tensor)
    vocabulary = padded_vocab_size(shape.vocabulary, tensor) // tensor * shape.hidden
    # With a value or reward head the output layer is a vector, and nothing is tied to it.
    tied = shape.tied and engine.head == "lm"
    if stage.is_first:
        dense += vocabulary
        largest = max(largest, vocabulary)
    if stage.is_last:
        dense += shape.final_norm
        if engine.head != "lm":
            dense += shape.hidden
        elif not (tied and stage.is_first):
            # Where first and last stage differ, a tied output layer is a copy of the embedding.
            dense += vocabulary
            largest = max(largest, vocabulary)
    return RankParameters(dense, experts, largest)
