"""Rewards that a program gives the trajectories of a group together, when all of them have ended."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from dagrl.ops.agents.programs import ProgramError, Verdict
from dagrl.ops.agents.rows import Trajectory

type ScoreGroup = Callable[[Sequence[Any]], Awaitable[list[Verdict]]]
"""From the states of a group's trajectories to their verdicts. Raises ProgramError."""


async def scored(ended: Mapping[int, Trajectory], score: ScoreGroup, timeout_s: float) -> dict[int, Trajectory]:
    """The trajectories of a group, by row, with their rewards.

    Those whose program failed are no part of it. If scoring fails, all others have failed.
    """
    waiting = {row: each for row, each in ended.items() if each.verdict.state is not None}
    found = dict(ended)
    if not waiting:
        return found
    failure = None
    try:
        async with asyncio.timeout(timeout_s):
            verdicts = await score([each.verdict.state for each in waiting.values()])
    except TimeoutError:
        failure = f"scoring its group took longer than timeout_s, {timeout_s:g} s"
    except ProgramError as error:
        failure = str(error)
    if failure is not None:
        return found | {row: replace(each, verdict=Verdict(), error=failure) for row, each in waiting.items()}
    pairs = zip(waiting.items(), verdicts, strict=True)
    return found | {row: replace(each, verdict=verdict) for (row, each), verdict in pairs}
