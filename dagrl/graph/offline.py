"""Pipelines that learn from the data set's responses: what they train on, and how many rows a prompt has.

Where nothing is trained on samples, a pipeline is *offline*: it may do without a rollout, and where it has one, that is
for validation alone.
"""

from __future__ import annotations

from dagrl.config.schema import DemonstrationNode, Pipeline, TrainingNode
from dagrl.graph.rollouts import leading_rollout, longest_sample, rollouts


def is_offline(pipeline: Pipeline) -> bool:
    """Whether no step samples anything: there is no rollout, or all that is trained learns from the data set."""
    trained = [node for node in pipeline.nodes.values() if isinstance(node, TrainingNode)]
    from_data = [isinstance(node, DemonstrationNode) and node.learns_from_data for node in trained]
    return not rollouts(pipeline) or (bool(trained) and all(from_data))


def tells_val_loss(pipeline: Pipeline) -> bool:
    """Whether validations tell the loss on the validation sets' responses."""
    nodes = pipeline.nodes.values()
    return is_offline(pipeline) and any(isinstance(node, DemonstrationNode) and node.val_loss for node in nodes)


def columns_read(pipeline: Pipeline, *, validation: bool = False) -> tuple[str, ...]:
    """Columns of the training file, or of the validation files, that responses are read from."""
    return pipeline.data.responses if not validation or tells_val_loss(pipeline) else ()


def needs_answers(pipeline: Pipeline, *, validation: bool = False) -> bool:
    """Whether the file must have reference answers: whether responses to its prompts are sampled, and scored."""
    return bool(rollouts(pipeline)) and (validation or not is_offline(pipeline))


def rows_per_prompt(pipeline: Pipeline, *, validation: bool = False) -> int:
    """Rows of a group: the responses that are sampled for a prompt, or those that the data set has for it."""
    if not rollouts(pipeline) or (is_offline(pipeline) and not validation):
        return max(1, len(pipeline.data.responses))
    leading = rollouts(pipeline)[leading_rollout(pipeline)]
    return leading.val_n if validation else leading.n


def longest_row(pipeline: Pipeline) -> int:
    """Tokens of the longest row that anything works on; 0 where nothing is sampled or given."""
    given = [longest_demonstration(pipeline)] if pipeline.data.responses else []
    return max([*given, *(longest_sample(pipeline, name) for name in rollouts(pipeline))], default=0)


def longest_demonstration(pipeline: Pipeline) -> int:
    """Tokens of the longest prompt with a response of the data set."""
    return pipeline.data.max_prompt_tokens + (pipeline.data.max_response_tokens or 0)
