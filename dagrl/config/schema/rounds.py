"""Prompts and rounds of a step, which a filter, over-sampling and a buffer change."""

from __future__ import annotations

import math

from dagrl.config.schema import BufferNode, FilterNode, Pipeline


def _filter_of(pipeline: Pipeline) -> FilterNode | None:
    """The filter; a pipeline has one at most."""
    return next((node for node in pipeline.nodes.values() if isinstance(node, FilterNode)), None)


def prompts_per_round(pipeline: Pipeline) -> int:
    """Prompts whose responses the first round of a step takes; without a filter the only round."""
    node = _filter_of(pipeline)
    return (node.prompts_per_round if node else None) or pipeline.data.prompts_per_step


def over_sampled(pipeline: Pipeline) -> int:
    """Prompts that a round starts in excess of those it takes."""
    rollouts = pipeline.rollouts
    begun = rollouts[pipeline.leading_rollout].over_sampling_batch_size if rollouts else None
    return begun - prompts_per_round(pipeline) if begun else 0


def prompts_begun(pipeline: Pipeline, taken: int | None = None) -> int:
    """Prompts that a round starts to take `taken`; by default a first round."""
    return (taken or prompts_per_round(pipeline)) + over_sampled(pipeline)


def expected_rounds(pipeline: Pipeline) -> int:
    """Expected rounds of a step, by ``expected_kept_fraction`` of the filter; 1 by default."""
    node = _filter_of(pipeline)
    if node is None or node.expected_kept_fraction is None:
        return 1
    kept = node.expected_kept_fraction * prompts_per_round(pipeline)
    # Rounded: 0.15 of 48 is a little less than 7.2 in floats, and no round more is needed for that.
    return min(node.max_rounds, math.ceil(round(pipeline.data.prompts_per_step / kept, 9)))


def groups_returned(pipeline: Pipeline) -> int:
    """Groups of earlier steps in a step, once the buffer is full enough; a pipeline has at most one buffer."""
    return sum(node.groups_per_step for node in pipeline.nodes.values() if isinstance(node, BufferNode))
