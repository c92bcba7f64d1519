"""Divides a step's batch into shards: consecutive whole groups, as evenly as possible."""

from __future__ import annotations


def shard_bounds(groups: int, shards: int) -> list[tuple[int, int]]:
    """First group and end of each shard; shards are empty if there are fewer groups than shards."""
    ends = [groups * (shard + 1) // shards for shard in range(shards)]
    return list(zip([0, *ends[:-1]], ends, strict=True))
