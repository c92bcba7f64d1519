"""Divides a step's batch into shards: consecutive whole groups, as evenly as possible."""

from __future__ import annotations


def shard_bounds(rows: int, group_size: int, shards: int) -> list[tuple[int, int]]:
    """First row and end of each shard; shards are empty if there are fewer groups than shards.

    `rows` is a multiple of `group_size`.
    """
    assert rows % group_size == 0, f"{rows} rows are not whole groups of {group_size}"
    groups = rows // group_size
    ends = [groups * (shard + 1) // shards * group_size for shard in range(shards)]
    return list(zip([0, *ends[:-1]], ends, strict=True))
