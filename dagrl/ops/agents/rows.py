"""Ended trajectories: their scores by group, their rows and their metrics."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dagrl.backends.base import not_sampled
from dagrl.data.batch import Column
from dagrl.data.image_column import shared_image_columns
from dagrl.data.stats import Stat
from dagrl.environments.failures import FAILURE_CLASSES
from dagrl.model_files.images import thumbnail
from dagrl.ops.agents.results import ProgramError, ProgramResult
from dagrl.ops.agents.tree import SampledSequence, SeenImage, TrajectoryTree
from dagrl.ops.response import Response, Turn
from dagrl.ops.turns.dialogue import ERROR

type ScoreGroup = Callable[[Sequence[Any]], Awaitable[list[ProgramResult]]]
"""Scores the states of a group's trajectories; returns their verdicts. Raises ProgramError."""


@dataclass(frozen=True, slots=True)
class Trajectory:
    """A trajectory that has ended."""

    tree: TrajectoryTree
    verdict: ProgramResult
    error: ProgramError | None
    """Why the program failed; None if it did not."""
    refused: str | None
    """``length`` or ``turns`` if a request was refused for that limit."""
    retries: int
    seconds: float

    @property
    def failed(self) -> bool:
        """Whether the program failed for another reason than a limit of the policy."""
        return self.error is not None and self.refused is None


@dataclass(frozen=True, slots=True)
class AgentRow:
    """The fields of a row of an agent rollout beside its response."""

    prompt: np.ndarray
    """Int64."""
    trajectory: Trajectory
    dropped: float
    """Fraction of the trajectory's sampled tokens that none of its rows contains."""
    first: bool
    """Whether it is the trajectory's first row, which holds its last reply."""
    share: float
    """Fraction of the trajectory's trained tokens; 1 in all of its rows together."""
    excluded: bool
    """Whether the trajectory is excluded from losses and baselines."""
    reward: float
    """The program's reward; NaN if it gave none."""
    images: tuple[SeenImage, ...] = ()


async def scored(ended: Mapping[int, Trajectory], score: ScoreGroup, timeout_s: float) -> dict[int, Trajectory]:
    """The trajectories of a group, by row, with their rewards.

    Trajectories whose program failed are not scored. If scoring fails, all others fail too.
    """
    waiting = {row: sequence for row, sequence in ended.items() if sequence.verdict.state is not None}
    trajectories = dict(ended)
    if not waiting:
        return trajectories
    failure = None
    try:
        async with asyncio.timeout(timeout_s):
            verdicts = await score([trajectory.verdict.state for trajectory in waiting.values()])
    except TimeoutError:
        failure = ProgramError(f"scoring its group took longer than timeout_s, {timeout_s:g} s", failure="grader")
    except ProgramError as error:
        failure = ProgramError(str(error), failure="grader")
    if failure is not None:
        return trajectories | {
            row: replace(trajectory, verdict=ProgramResult(), error=failure) for row, trajectory in waiting.items()
        }
    pairs = zip(waiting.items(), verdicts, strict=True)
    return trajectories | {row: replace(sequence, verdict=verdict) for (row, sequence), verdict in pairs}


def responses_of(
    trajectory: Trajectory,
    prompt: np.ndarray,
    rows: int,
    *,
    version: int,
    zero: bool = False,
    begun: int = 0,
    images: tuple[SeenImage, ...] = (),
) -> list[Response]:
    """The `rows` rows of a trajectory; unused rows have one token that is not trained on.

    `prompt` and `images` are the row's in the data set, `version` is the weights' version, `begun` the number of tokens
    that earlier steps sampled. With `zero`, a failed program has the reward 0; otherwise its trajectory is excluded, as
    is one without any reply.
    """
    sequences = trajectory.tree.sequences(rows)
    excluded = not sequences or (trajectory.failed and not zero)
    reward = trajectory.verdict.reward
    if trajectory.error is not None:
        reward = 0.0
    version = min([sequence.version for sequence in sequences], default=version)
    trained = sum(sequence.trained for sequence in sequences)
    sampled = trajectory.tree.sampled_tokens()
    made = []
    for number in range(rows):
        sequence = sequences[number] if number < len(sequences) else None
        # Without a request, the first row has the row's prompt, which is shown among samples.
        unused = prompt if images or not number else prompt[-1:]
        row = AgentRow(
            unused if sequence is None else sequence.prompt,
            trajectory,
            1 - trained / sampled if sampled else 0.0,
            first=number == 0,
            share=sequence.trained / trained if sequence else 0.0,
            excluded=excluded,
            reward=np.nan if reward is None else reward,
            images=images if sequence is None else tuple(image.image for image in sequence.prompt_images),
        )
        response = _unused(prompt, version) if sequence is None else _response(sequence, trained=not excluded)
        reason = trajectory.refused or response.finish_reason
        if trajectory.error is not None and trajectory.failed:
            reason = ERROR if trajectory.error.failure == "program" else trajectory.error.failure
        # A trajectory's first tokens may be in any of its rows; only their sum is reported.
        earlier = min(begun, sequence.trained) if sequence else 0
        begun -= earlier
        made.append(replace(response, agent=row, finish_reason=reason, begun=earlier))
    return made


def agent_columns_of(responses: Sequence[Response], *, several: bool, has_images: bool) -> dict[str, Column]:
    """Columns that only an agent rollout writes.

    With `several` also the columns of trajectories with several rows, with `has_images` the columns of prompts' images.
    """
    rows = [agent_row(response) for response in responses]
    columns = {
        "prompt_tokens": Column.ragged([row.prompt for row in rows], "int64"),
        "excluded": Column(np.array([row.excluded for row in rows], dtype=np.float32)),
        "agent_reward": Column(np.array([row.reward for row in rows], dtype=np.float32)),
        "agent_output": Column.text([row.trajectory.verdict.output if row.first else "" for row in rows]),
    }
    if several:
        columns["trajectory_share"] = Column(np.array([row.share for row in rows], dtype=np.float32))
    if has_images:
        columns |= shared_image_columns([[image.pixels for image in row.images] for row in rows])
        columns["image_names"] = Column.text([json.dumps([image.name for image in row.images]) for row in rows])
        seen = {id(image): image for row in rows for image in row.images}
        thumbnails = {key: thumbnail(image.pixels) for key, image in seen.items()}
        shown = [json.dumps([thumbnails[id(image)] for image in row.images]) for row in rows]
        columns["image_thumbnails"] = Column.text(shown)
    return columns


def agent_stats(responses: Sequence[Response]) -> dict[str, Stat]:
    """Statistics of agents."""
    rows = [row for row in map(agent_row, responses) if row.first]
    trajectories = [row.trajectory for row in rows]
    failures = [
        trajectory.error.failure if trajectory.error and trajectory.failed else None for trajectory in trajectories
    ]
    stats = {
        "agent/failed_fraction": Stat.of([trajectory.failed for trajectory in trajectories]),
        **{f"agent/failed/{each}": Stat.of([found == each for found in failures]) for each in FAILURE_CLASSES},
        # Failures of the infrastructure: an error of the program itself is the user's to mend.
        "failed/agent": Stat.of([found not in (None, "program") for found in failures]),
        "agent/retries": Stat.of([trajectory.retries for trajectory in trajectories]),
        "agent/requests": Stat.of([len(trajectory.tree.exchanges) for trajectory in trajectories]),
        "agent/dropped_token_fraction": Stat.of([row.dropped for row in rows]),
        "agent/seconds": Stat.of([trajectory.seconds for trajectory in trajectories]),
    }
    names = dict.fromkeys(name for trajectory in trajectories for name in trajectory.verdict.metrics)
    for name in names:
        values = [trajectory.verdict.metrics[name] for trajectory in trajectories if name in trajectory.verdict.metrics]
        stats[f"agent/{name}"] = Stat.of(values)
    return stats


def agent_row(response: Response) -> AgentRow:
    assert response.agent is not None
    return response.agent


def _response(sequence: SampledSequence, *, trained: bool) -> Response:
    mask = np.zeros(len(sequence.tokens), dtype=np.float32)
    for span in sequence.spans:
        mask[span.begin : span.end] = span.trained and trained
    return Response(
        sequence.version,
        sequence.tokens,
        sequence.logprobs,
        mask,
        sequence.versions,
        sequence.finish_reason,
        sequence.routed_experts,
        tuple(Turn(span.begin, span.end) for span in sequence.spans),
        images=tuple(placed.image.pixels for placed in sequence.images),
        image_starts=np.array([image.begin for image in sequence.images], dtype=np.int64),
    )


def _unused(prompt: np.ndarray, version: int) -> Response:
    """A row without a sequence: the shortest that every engine can process."""
    return Response(
        version,
        prompt[-1:],
        np.zeros(1, dtype=np.float32),
        np.zeros(1, dtype=np.float32),
        not_sampled(1),
        "stop",
    )
