"""Data of a step: its rollouts, the rows of a prompt and their lengths, the rounds of a filter.

Where nothing is trained on samples, a pipeline is *offline*: it may do without a rollout, and one that it has is for
validation alone.
"""

from __future__ import annotations

import math

from dagrl.config.errors import Place
from dagrl.config.schema import DemonstrationNode, FilterNode, Pipeline, RolloutNode, SamplingSpec, TrainingNode


def rollouts(pipeline: Pipeline) -> dict[str, RolloutNode]:
    """All of them by name, in the order of the file."""
    return {name: node for name, node in pipeline.nodes.items() if isinstance(node, RolloutNode)}


def leading_rollout(pipeline: Pipeline) -> str:
    """The rollout that sets the rows of a prompt, and whose responses `samples` stores.

    The first with the largest ``n``: others sample as many for each prompt, or answer each row once. There must be one.
    """
    found = rollouts(pipeline)
    return max(found, key=lambda name: found[name].n)


def longest_sample(pipeline: Pipeline, name: str) -> int:
    """Tokens of the longest prompt and response of a rollout, in training."""
    return longest_by_key(pipeline, name, validated=False)["nodes", name, "sampling"]


def samplings(pipeline: Pipeline, name: str, *, validated: bool = True) -> dict[Place, SamplingSpec]:
    """The sampling options of a rollout by their places in the file.

    Those of training, and those of validation where they are others and the pipeline validates (`validated`).
    """
    node, place = rollouts(pipeline)[name], ("nodes", name)
    found: dict[Place, SamplingSpec] = {(*place, "sampling"): node.sampling}
    if validated and node.val_sampling is not None:
        found[*place, "val_sampling"] = node.val_sampling
    if validated and name == leading_rollout(pipeline):
        for key, each in pipeline.data.val_sets.items():
            if each.sampling is not None:
                found["data", "val", key, "sampling"] = each.sampling
    return found


def val_sampling(pipeline: Pipeline, name: str, val_set: str | None = None) -> SamplingSpec:
    """The sampling of a rollout in validation: of a set, or of those without their own. Greedy by default."""
    node, own = rollouts(pipeline)[name], pipeline.data.val_sets.get(val_set or "")
    if own is not None and own.sampling is not None and name == leading_rollout(pipeline):
        return own.sampling
    return node.val_sampling or node.sampling.model_copy(update={"temperature": 0.0})


def val_ns(pipeline: Pipeline) -> dict[str, int]:
    """Validation set -> responses to each of its prompts."""
    usual = rollouts(pipeline)[leading_rollout(pipeline)].val_n
    return {name: each.n or usual for name, each in pipeline.data.val_sets.items()}


def longest_by_key(pipeline: Pipeline, name: str, *, validated: bool) -> dict[Place, int]:
    """Tokens of the longest prompt and response of a rollout, by the places of `samplings`."""
    prompt = rollouts(pipeline)[name].max_prompt_tokens or pipeline.data.max_prompt_tokens
    found = samplings(pipeline, name, validated=validated)
    return {place: prompt + sampling.max_new_tokens for place, sampling in found.items()}


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
    """Rows of a group: the responses that are sampled for a prompt, or those that the data set has for it.

    In a validation whose sets have different numbers of responses, a prompt has several groups, of the size that
    divides all of them.
    """
    if not rollouts(pipeline) or (is_offline(pipeline) and not validation):
        return max(1, len(pipeline.data.responses))
    leading = rollouts(pipeline)[leading_rollout(pipeline)]
    if validation:
        return math.gcd(*val_ns(pipeline).values()) or leading.val_n
    return leading.n * leading.rows_per_sample


def longest_row(pipeline: Pipeline) -> int:
    """Tokens of the longest row that anything works on; 0 where nothing is sampled or given."""
    given = [longest_demonstration(pipeline)] if pipeline.data.responses else []
    return max([*given, *(longest_sample(pipeline, name) for name in rollouts(pipeline))], default=0)


def longest_demonstration(pipeline: Pipeline) -> int:
    """Tokens of the longest prompt with a response of the data set."""
    return pipeline.data.max_prompt_tokens + (pipeline.data.max_response_tokens or 0)


def filter_of(pipeline: Pipeline) -> FilterNode | None:
    """The filter; a pipeline has one at most."""
    return next((node for node in pipeline.nodes.values() if isinstance(node, FilterNode)), None)


def prompts_per_round(pipeline: Pipeline) -> int:
    """Prompts whose responses the first round of a step takes; without a filter the only round."""
    node = filter_of(pipeline)
    return (node.prompts_per_round if node else None) or pipeline.data.prompts_per_step


def over_sampled(pipeline: Pipeline) -> int:
    """Prompts that a round starts in excess of those it takes."""
    found = rollouts(pipeline)
    begun = found[leading_rollout(pipeline)].over_sampling_batch_size if found else None
    return begun - prompts_per_round(pipeline) if begun else 0


def prompts_begun(pipeline: Pipeline, taken: int | None = None) -> int:
    """Prompts that a round starts to take `taken`; by default a first round."""
    return (taken or prompts_per_round(pipeline)) + over_sampled(pipeline)


def expected_rounds(pipeline: Pipeline) -> int:
    """Expected rounds of a step, by ``expected_kept_fraction`` of the filter; 1 by default."""
    node = filter_of(pipeline)
    if node is None or node.expected_kept_fraction is None:
        return 1
    kept = node.expected_kept_fraction * prompts_per_round(pipeline)
    # Rounded: 0.15 of 48 is a little less than 7.2 in floats, and no round more is needed for that.
    return min(node.max_rounds, math.ceil(round(pipeline.data.prompts_per_step / kept, 9)))
