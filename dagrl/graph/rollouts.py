"""The rollouts of a pipeline: most have one; where several agents answer each other, each has its own."""

from __future__ import annotations

from dagrl.config.schema import Pipeline, RolloutNode


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
    return longest_by_key(pipeline, name, validated=False)["sampling"]


def longest_by_key(pipeline: Pipeline, name: str, *, validated: bool) -> dict[str, int]:
    """Tokens of the longest prompt and response of a rollout, by the key of its sampling options.

    That of training, and that of validation where it is another one and the pipeline validates (`validated`).
    """
    node = rollouts(pipeline)[name]
    prompt = node.max_prompt_tokens or pipeline.data.max_prompt_tokens
    longest = {"sampling": prompt + node.sampling.max_new_tokens}
    if validated and node.val_sampling is not None:
        longest["val_sampling"] = prompt + node.val_sampling.max_new_tokens
    return longest
