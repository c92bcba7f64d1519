"""Seconds that a rollout of several turns waits for tools or an environment, as far as the pipeline says."""

from __future__ import annotations

from collections.abc import Sequence

from dagrl.backends.decoding import Generation
from dagrl.config.schema import RolloutNode


def answered_ends(ends: Sequence[float], work: Generation, node: RolloutNode) -> Sequence[float]:
    """When each shard is done whose decoding alone is done at `ends`.

    A response waits for each of its answers, while the server goes on with others; and a worker has no more than
    ``tool_concurrency`` of them under way. What is left out: that a server with fewer responses at a time takes their
    steps faster, and what it takes in anew of each answer.
    """
    if not node.multi_turn or node.expected_call_s is None:
        return ends
    waits = node.expected_answers * node.expected_call_s
    in_all = work.prompts * work.per_prompt * waits / node.tool_concurrency
    return [max(end + waits, in_all * (index + 1) / len(ends)) for index, end in enumerate(ends)]
