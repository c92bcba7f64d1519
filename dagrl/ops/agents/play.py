"""The trajectories of one call of a rollout: programs run, their requests go to the engine, replies go back.

    programs --HTTP--> gateway --requests--> engine
       ^                  |                    |
       +----- replies ----+<---- completions --+

All runs on the endpoint's event loop, so that a request wakes no further thread; ended trajectories go to the thread
that yields them.
"""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count, zip_longest

import numpy as np

from dagrl.backends.base import EngineLostError, GenerationRequest
from dagrl.config.schema import RolloutNode
from dagrl.data.batch import Batch
from dagrl.ops.agents.messages import RowImages, images_of_rows
from dagrl.ops.agents.rows import ScoreGroup, Trajectory, agent_row, responses_of, scored
from dagrl.ops.agents.running import Agent, WaitingRequest
from dagrl.ops.agents.session import Ask, Session
from dagrl.ops.agents.setup import AgentSetup, agent_setup, row_of
from dagrl.ops.agents.tree import TrajectoryTree
from dagrl.ops.base import Context
from dagrl.ops.response import ABORTED, Response
from dagrl.ops.turns.requests import CallEnded, PausedGroups, RequestCompleted, RequestQueue

_GATHER_S = 0.01
"""How long an idle engine that decodes in batches waits for a further request after each."""
_POLL_S = 0.5
"""Interval of checks for an abort while programs do other work."""
_CLOSE_S = 5.0


class AgentFailedError(RuntimeError):
    """A program failed, and ``on_error`` is stop."""


@dataclass(frozen=True, slots=True)
class _Ended:
    row: int
    trajectory: Trajectory


@dataclass(slots=True)
class AgentRollouts:
    """The trajectories of one call.

    `run` yields the row and the response of each row of the batch, all rows of a trajectory together. `requests` are
    the ones with which a rollout without an agent would begin. After an abort, unfinished trajectories have one
    unfinished response, the tokens sampled for them; with ``partial_rollout``, or if servers were lost, their agents
    wait for a later call. Raises AgentFailedError, and EngineLostError after all responses.
    """

    batch: Batch
    requests: Mapping[int, GenerationRequest]
    context: Context
    _setup: AgentSetup = field(init=False)
    _loop: asyncio.AbstractEventLoop = field(init=False)
    _paused: PausedGroups[Agent] = field(init=False)
    _version: int = field(init=False)
    """The policy version at the start of the call."""
    _events: queue.SimpleQueue[_Ended | BaseException | None] = field(default_factory=queue.SimpleQueue)
    """Ended trajectories and errors of dagrl itself; None when an abort has ended the engine's calls."""
    _queue: RequestQueue = field(init=False)
    _waiting: dict[int, WaitingRequest] = field(default_factory=dict)
    """Requests without a completion, by number."""
    _numbers: count[int] = field(default_factory=count)
    _timer: asyncio.TimerHandle | None = None
    """Passes the queued requests to the engine."""
    _open: set[int] = field(default_factory=set)
    """First rows of the trajectories that have not ended."""
    _agents: dict[int, Agent] = field(default_factory=dict)
    """First row -> agent; complete once the call has begun."""
    _images: dict[int, RowImages] = field(init=False)
    """First row -> images of the data set."""
    _outdated: set[int] = field(default_factory=set)
    """First rows of agents that were too old to be continued."""
    _unscored: dict[int, dict[int, Trajectory]] = field(default_factory=dict)
    """Group -> its ended trajectories, by first row, if a group is scored together."""
    _scorings: set[asyncio.Task[None]] = field(default_factory=set)
    _aborted: bool = False
    _lost: EngineLostError | None = None

    def __post_init__(self) -> None:
        context = self.context
        self._setup = agent_setup(context)
        self._loop = self._setup.gateway.loop
        self._paused = context.resources.once(f"paused agents of {context.work.task}", self._paused_agents)
        self._queue = RequestQueue(context.generator, context.sampling, self._deliver)
        self._version = context.policy_version
        self._open = {row for row in self.requests if not self.batch.rows[row] % context.sequences}
        self._images = images_of_rows(self.batch, sorted(self._open))
        groups = self.batch["group_id"].values
        # Their group ended in an earlier step, with weights that are now too old.
        self._outdated = {row for row in self._open if int(groups[row]) in context.begun}

    def _paused_agents(self) -> PausedGroups[Agent]:
        paused: PausedGroups[Agent] = PausedGroups(Agent.cancel)
        # The function below outlives this call, and must not keep its batch.
        loop = self._loop

        async def end() -> None:
            await asyncio.gather(*(agent.end() for agent in paused.all()))

        def close() -> None:
            with suppress(TimeoutError):
                asyncio.run_coroutine_threadsafe(end(), loop).result(_CLOSE_S)

        self.context.resources.at_close.append(close)
        return paused

    # -- in the thread that yields

    def run(self) -> Iterator[tuple[int, Response]]:
        ended = False
        try:
            self._on_loop(self._start)
            while self._open and not (self._aborted and self._queue.idle):
                yield from self._next_ended()
                self._aborted = self._aborted or self.context.aborted()
            ended = True
            if self._open:
                for row, (tokens, counts) in self._on_loop(self._pause).items():
                    yield row, Response(self._version, tokens, outdated=row in self._outdated, counts=counts)
            if self._lost is not None:
                raise self._lost
        finally:
            self._loop.call_soon_threadsafe(self._queue.leave)
            if not ended or not self._keeps:
                self._loop.call_soon_threadsafe(self._cancel)

    @property
    def _keeps(self) -> bool:
        """Whether a later call continues unfinished agents."""
        return self.context.keeps_unfinished or self._lost is not None or self.context.interrupted()

    def _on_loop[Result](self, function: Callable[[], Result]) -> Result:
        """Call a function on the endpoint's loop, after all earlier ones."""

        async def call() -> Result:
            return function()

        return asyncio.run_coroutine_threadsafe(call(), self._loop).result()

    def _next_ended(self) -> Iterator[tuple[int, Response]]:
        """Wait briefly for trajectories, and yield the rows of ended ones."""
        with suppress(queue.Empty):
            event = self._events.get(timeout=_POLL_S)
            while True:
                if isinstance(event, BaseException):
                    raise event
                if event is not None:
                    yield from self._rows_of(event)
                event = self._events.get_nowait()

    def _rows_of(self, event: _Ended) -> Iterator[tuple[int, Response]]:
        trajectory, spec, context = event.trajectory, self._setup.spec, self.context
        treatment = spec.treatment_of(trajectory.error.failure) if trajectory.error is not None else "mask"
        if treatment == "stop":
            raise AgentFailedError(
                f"the agent `{spec.shown}` failed for sample {self.batch.rows[event.row]}: {trajectory.error}; "
                "`on_error: mask` would leave the sample out"
            )
        self._open.discard(event.row)
        responses = responses_of(
            trajectory,
            self.requests[event.row].prompt,
            context.sequences,
            version=context.generator.policy_version,
            zero=treatment == "zero",
            begun=self._agents[event.row].begun,
            images=self._images[event.row].seen,
        )
        counts = {
            **self._agents[event.row].new_counts(),
            "held": sum(int(np.count_nonzero(response.mask)) for response in responses),
            "agent_failed": int(agent_row(responses[0]).excluded),
        }
        for row, response in enumerate(responses, event.row):
            if context.rollout.mask_offpolicy_in_partial_rollout:
                response = response.without_older(self._version)
            own = counts if row == event.row else {}
            yield row, replace(response, outdated=event.row in self._outdated, counts=own)

    # -- on the endpoint's loop

    def _start(self) -> None:
        context, paused_groups = self.context, self.context.paused
        self._paused.release_before(context.oldest_continued_step)
        for group, rows in self._rows_of_groups().items():
            paused = self._paused.take(paused_groups.get(group))
            for row, agent in zip_longest(rows, paused):
                self._agents[row] = self._agent(row, agent)
        for row, agent in self._agents.items():
            agent.serve(self, row)

    def _rows_of_groups(self) -> dict[int, list[int]]:
        rows: dict[int, list[int]] = {}
        for row in sorted(self._open):
            rows.setdefault(int(self.batch["group_id"][row]), []).append(row)
        return rows

    def _agent(self, row: int, paused: Agent | None) -> Agent:
        """The agent of a row: the paused one, unless its tokens are too old."""
        if paused is not None:
            oldest = paused.oldest
            if oldest is None or self._version - oldest <= self.context.rollout.partial_rollout_max_age:
                return paused
            paused.cancel()
            self._outdated.add(row)
        request, images = self.requests[row], self._images[row]
        node, sampling = self.context.rollout, request.sampling or self.context.sampling
        longest = node.max_prompt_tokens or self.context.pipeline.data.max_prompt_tokens
        tree = partial(TrajectoryTree, request.prompt, request.seed, longest, sampling.max_new_tokens, sampling)
        # Not the context: a paused agent would keep the batch of this step.
        new_session = partial(_session, tree, images, self._setup, node)
        return Agent(self._setup, row_of(self.batch, row, request.seed, images), new_session)

    def _pause(self) -> dict[int, tuple[np.ndarray, dict[str, int]]]:
        """Pause all agents of unfinished groups; returns the tokens sampled for unfinished agents."""
        self._cancel_scorings()
        groups = self.batch["group_id"].values
        left: dict[int, list[Agent]] = {int(groups[row]): [] for row in self._open}
        sampled = {}
        for row, agent in self._agents.items():
            if (group := int(groups[row])) in left:
                counts, tokens = agent.new_counts(), agent.pause()
                left[group].append(agent)
                if row in self._open:
                    sampled[row] = tokens, counts
        if self._keeps:
            for group, agents in left.items():
                self._paused.put((self.context.step, group), agents)
        return sampled

    def _cancel_scorings(self) -> None:
        for scoring in self._scorings:
            scoring.cancel()

    def _cancel(self) -> None:
        self._cancel_scorings()
        for agent in self._agents.values():
            agent.cancel()
        for waiting in self._waiting.values():
            waiting.reply.cancel()

    def ask(self, waiting: WaitingRequest) -> None:
        number = next(self._numbers)
        self._waiting[number] = waiting
        self._queue.ask(number, waiting.remaining())
        if self._timer is not None:
            self._timer.cancel()
        if self.context.generator.serializes_calls and self._queue.idle and len(self._waiting) < len(self._open):
            self._timer = self._loop.call_later(_GATHER_S, self._flush)
        else:
            self._flush()

    def _flush(self) -> None:
        # After an abort, requests wait for another call.
        if not (self._aborted or self.context.aborted()):
            self._queue.flush()

    def _deliver(self, *events: RequestCompleted | CallEnded) -> None:
        self._loop.call_soon_threadsafe(self._received, events)

    def _received(self, events: Sequence[RequestCompleted | CallEnded]) -> None:
        for event in events:
            if isinstance(event, RequestCompleted):
                self._aborted = self._aborted or event.completion.finish_reason == ABORTED
                self._waiting.pop(event.number).extend(event.completion)
            else:
                self._call_ended(event)

    def _call_ended(self, event: CallEnded) -> None:
        self._queue.call_ended()
        if isinstance(event.failure, EngineLostError):
            self._lost, self._aborted = event.failure, True
            self._events.put(None)
        elif event.failure is not None:
            self.broken(event.failure)
        elif self._aborted:
            self._events.put(None)
        else:
            self._flush()

    def ended(self, row: int, trajectory: Trajectory) -> None:
        if self._setup.score is None:
            self._events.put(_Ended(row, trajectory))
            return
        groups = self.batch["group_id"].values
        ended = self._unscored.setdefault(int(groups[row]), {})
        ended[row] = trajectory
        # A call has all rows of a group, because groups are dispatched whole.
        if len(ended) == sum(groups[first] == groups[row] for first in self._agents):
            scoring = asyncio.get_running_loop().create_task(self._scored(ended, self._setup.score))
            self._scorings.add(scoring)
            scoring.add_done_callback(self._scorings.discard)

    async def _scored(self, ended: dict[int, Trajectory], score: ScoreGroup) -> None:
        try:
            trajectories = await scored(dict(sorted(ended.items())), score, self._setup.spec.timeout_s)
        except Exception as failure:  # noqa: BLE001
            # The user's function may raise anything. The thread that yields the responses raises it.
            self.broken(failure)
            return
        for row, trajectory in trajectories.items():
            self._events.put(_Ended(row, trajectory))

    def broken(self, failure: BaseException) -> None:
        """End the call because something other than a program has failed."""
        self._events.put(failure)


def _session(
    tree: Callable[[], TrajectoryTree], images: RowImages, setup: AgentSetup, node: RolloutNode, ask: Ask
) -> Session:
    hermes = node.tool_format == "hermes"
    return Session(tree(), setup.writer, setup.parser, hermes, ask, node.max_turns, setup.reader, images.by_key())
