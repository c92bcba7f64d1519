"""Seconds that a rollout of several turns waits for tools or an environment, if the pipeline says them."""

from __future__ import annotations

from collections.abc import Sequence

from dagrl.backends.decoding import Generation
from dagrl.config.schema import RolloutNode


def answered_ends(ends: Sequence[float], work: Generation, node: RolloutNode) -> Sequence[float]:
    """Return the ends of shards whose decoding alone ends at `ends`.

    A response waits for each of its answers, while the server goes on with others; a worker waits for at most
    ``tool_concurrency`` answers at a time. Not counted: steps are faster with fewer responses at a time, and answers
    are prefilled.
    """
    if not node.multi_turn or node.expected_call_s is None:
        return ends
    waits = node.expected_answers * node.expected_call_s
    in_all = work.prompts * work.per_prompt * waits / node.tool_concurrency
    return [max(end + waits, in_all * (index + 1) / len(ends)) for index, end in enumerate(ends)]
