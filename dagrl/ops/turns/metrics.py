"""Metrics of multi-turn rollouts."""

from __future__ import annotations

from collections.abc import Sequence

from dagrl.config.schema import RolloutNode
from dagrl.data.stats import Stat
from dagrl.ops.response import Response
from dagrl.ops.turns.dialogue import ERROR, TURNS


def turn_stats(responses: Sequence[Response], node: RolloutNode) -> dict[str, Stat]:
    """Metrics of finished responses of a node."""
    calls = sum(turn.calls for each in responses for turn in each.turns)
    failed = sum(turn.failed_calls for each in responses for turn in each.turns)
    tokens = sum(len(each.tokens) for each in responses)
    stats = {
        "turns": Stat.of([len(each.turns) for each in responses]),
        "turns/out_of_turns_fraction": Stat.of([each.finish_reason == TURNS for each in responses]),
        "turns/observation_token_fraction": Stat.weighted(tokens - sum(each.sampled for each in responses), tokens),
    }
    if node.has_tools:
        stats["tools/calls_per_response"] = Stat.weighted(calls, len(responses))
        stats["tools/failed_fraction"] = Stat.weighted(failed, calls)
    if node.environment:
        rewards = [sum(turn.reward for turn in each.turns) for each in responses]
        stats["environment/reward"] = Stat.of(rewards)
        stats["environment/failed_fraction"] = Stat.of([each.finish_reason == ERROR for each in responses])
    return stats
