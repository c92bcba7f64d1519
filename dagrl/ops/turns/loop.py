"""The loop of a multi-turn rollout: turns come from the engine, answers from tools and environments.

    engine --turn--> dialogue --work--> jobs
       ^                                 |
       +----- prompt and tokens <--------+   answers, as tokens

One thread, which yields the responses, takes all decisions; the others wait for an engine or a tool.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from dagrl.backends.base import EngineLostError, GenerationRequest
from dagrl.backends.tool_calls import begins_reasoning
from dagrl.data.batch import Batch
from dagrl.ops.base import Context
from dagrl.ops.response import ABORTED, Response, response_text
from dagrl.ops.turns.dialogue import LENGTH, PendingOutcome, ResponseDialogue
from dagrl.ops.turns.jobs import JobResult, Jobs
from dagrl.ops.turns.requests import CallEnded, PausedGroups, RequestCompleted, RequestQueue
from dagrl.ops.turns.settings import message_writer, row_fields, turn_settings
from dagrl.ops.turns.template import Answer

_GATHER_S = 0.01
"""How long an idle engine waits for further answers after one has arrived, to form a larger batch."""
_POLL_S = 0.1
"""Interval of checks for an abort while tools and environments work: only a sampling engine reports it."""


@dataclass(frozen=True, slots=True)
class _PausedResponse:
    """A response, possibly finished, and its tools and environment."""

    response: Response
    dialogue: ResponseDialogue


class Conversations:
    """The multi-turn responses of one call.

    `run` yields the row and the finished response of each of `requests`, by row. After an abort it yields unfinished
    responses as they are. With ``partial_rollout``, or if servers were lost, they and their environments wait for a
    later call; EngineLostError is raised after them if the server is this worker's. `responses` are empty, or marked as
    outdated.
    """

    def __init__(
        self, batch: Batch, requests: Mapping[int, GenerationRequest], responses: Sequence[Response], context: Context
    ) -> None:
        node = context.rollout
        self._max_turns, self._sampling = node.max_turns, context.sampling
        self._max_turn_tokens = node.max_turn_tokens
        self._tokenizer = context.resources.tokenizer
        self._writer, settings = message_writer(context), turn_settings(context)
        self._is_aborted = context.aborted
        self._requests = dict(requests)
        self._open = {row: responses[row] for row in requests}
        self._dialogues = {
            row: ResponseDialogue(settings, row_fields(batch, row, request.seed, context))
            for row, request in requests.items()
        }
        self._pending: dict[int, PendingOutcome] = {}
        """Pending outcomes by row."""
        self._rows_of_jobs: dict[int, tuple[int, int]] = {}
        """Job -> row and index in its pending outcome."""
        self._finished: dict[int, Response] = {}
        self._context, self._groups = context, batch["group_id"].values
        self._paused: PausedGroups[_PausedResponse] = context.resources.once(
            f"paused responses of {context.work.task}", lambda: PausedGroups(lambda paused: paused.dialogue.leave())
        )
        self._aborted = False
        self._lost: EngineLostError | None = None
        self._events: queue.SimpleQueue[RequestCompleted | CallEnded | JobResult] = queue.SimpleQueue()
        self._queue = RequestQueue(context.generator, self._sampling, self._deliver)
        self._jobs = Jobs(self._events.put, max_running=node.tool_concurrency, timeout_s=node.tool_timeout_s)

    def run(self) -> Iterator[tuple[int, Response]]:
        try:
            yield from self._go_on()
            for row in self._open:
                self._ask(row)
            self._queue.flush()
            # Pending answers cannot be requested again.
            while self._open and not (self._aborted and self._queue.idle and not (self._keeps and self._pending)):
                for event in self._next_events():
                    yield from self._take(event)
                self._aborted = self._aborted or self._is_aborted()
                if not self._aborted:
                    self._queue.flush()
            # A response that waits for a tool has ended its turn, but is not finished.
            yield from [(row, replace(response, finish_reason=ABORTED)) for row, response in self._open.items()]
            if self._keeps:
                self._pause()
            if self._lost is not None:
                raise self._lost
        finally:
            self._queue.leave()
            for row in self._open:
                self._dialogues[row].leave()

    @property
    def _keeps(self) -> bool:
        """Whether a later call continues unfinished responses."""
        return self._context.keeps_unfinished or self._lost is not None or self._context.interrupted()

    def _deliver(self, *events: RequestCompleted | CallEnded) -> None:
        for event in events:
            self._events.put(event)

    def _go_on(self) -> Iterator[tuple[int, Response]]:
        """Resume the responses that an earlier call paused; yield the ended ones."""
        context, node = self._context, self._context.rollout
        self._paused.release_before(context.oldest_continued_step)
        version = context.policy_version
        for group, key in context.paused.items():
            rows = [row for row in sorted(self._open) if self._groups[row] == group]
            for row, paused in zip(rows, self._paused.take(key), strict=False):
                response = paused.response.continued()
                if version - response.version > node.partial_rollout_max_age:
                    paused.dialogue.leave()
                    self._open[row] = replace(self._open[row], outdated=True)
                    continue
                if node.mask_offpolicy_in_partial_rollout:
                    response = response.without_older(version)
                self._dialogues[row] = paused.dialogue
                if response.finished:
                    yield self._finish(row, response)
                else:
                    self._open[row] = response

    def _pause(self) -> None:
        """Keep the responses of all groups with an unfinished response."""
        for group in {int(self._groups[row]) for row in self._open}:
            rows = [row for row in sorted(self._requests) if self._groups[row] == group]
            kept = {**self._finished, **self._open}
            self._paused.put(
                (self._context.step, group), [_PausedResponse(kept[row], self._dialogues[row]) for row in rows]
            )
        self._open.clear()

    def _finish(self, row: int, response: Response) -> tuple[int, Response]:
        del self._open[row]
        self._dialogues[row].leave()
        self._finished[row] = response
        return row, response

    def _next_events(self) -> list[RequestCompleted | CallEnded | JobResult]:
        """Wait briefly for events. Engines and jobs have their own timeouts."""
        left_s = self._jobs.left_s()
        try:
            events = [self._events.get(timeout=_POLL_S if left_s is None else min(left_s, _POLL_S))]
        except queue.Empty:
            return list(self._jobs.late())
        until = time.monotonic() + _GATHER_S
        while True:
            gathers = self._queue.idle and self._jobs.left_s() is not None
            try:
                events.append(self._events.get(timeout=max(0.0, until - time.monotonic()) if gathers else 0.0))
            except queue.Empty:
                return events

    def _take(self, event: RequestCompleted | CallEnded | JobResult) -> Iterator[tuple[int, Response]]:
        match event:
            case CallEnded():
                self._queue.call_ended()
                if isinstance(event.failure, EngineLostError):
                    self._lost, self._aborted = event.failure, True
                elif event.failure is not None:
                    raise event.failure
            case RequestCompleted():
                yield from self._turn_done(event)
            case JobResult():
                if self._jobs.settle(event):
                    row, index = self._rows_of_jobs.pop(event.job)
                    self._pending[row].results[index] = event
                    yield from self._continue(row)

    def _turn_done(self, event: RequestCompleted) -> Iterator[tuple[int, Response]]:
        row, completion = event.number, event.completion
        response = self._open[row] = self._open[row].with_turn(completion)
        if completion.finish_reason == ABORTED:
            self._aborted = True
            return
        turn = response.turns[-1]
        cut = completion.finish_reason == LENGTH
        text = response_text(response.tokens[turn.begin : turn.end], self._context)
        last = len(response.turns) >= self._max_turns
        # The tokens before the turn: the prompt, or the answers to the previous turn.
        context = response.tokens[: turn.begin] if turn.begin else self._requests[row].prompt
        thinks = begins_reasoning(self._tokenizer, context)
        pending = self._pending[row] = self._dialogues[row].respond(text, cut=cut, last=last, thinks=thinks)
        for index, work in enumerate(pending.work):
            if work is not None:
                self._rows_of_jobs[self._jobs.begin(work)] = row, index
        yield from self._continue(row)

    def _continue(self, row: int) -> Iterator[tuple[int, Response]]:
        """Continue or finish a response once its outcome is known."""
        outcome = self._pending[row].outcome
        if outcome is None:
            return
        del self._pending[row]
        response = self._open[row].with_outcome(
            reward=outcome.reward, calls=outcome.calls, failed_calls=outcome.failed_calls
        )
        longest = (self._requests[row].sampling or self._sampling).max_new_tokens
        following = self._with_answers(response, outcome.answers, longest) if outcome.ends is None else None
        if following is not None:
            self._open[row] = following
            self._ask(row)
            return
        yield self._finish(row, response.ended(outcome.ends or LENGTH))

    def _with_answers(self, response: Response, answers: Sequence[Answer], longest: int) -> Response | None:
        """The response with the answers appended; None if no token would fit after them within `longest` tokens."""
        tokens = self._writer.tokens(answers, int(response.tokens[-1]))
        images = [image for answer in answers for image in answer.images]
        following = response.with_observation(tokens, images, self._writer.image_starts(tokens, images))
        return following if len(following.tokens) < longest else None

    def _ask(self, row: int) -> None:
        request, response = self._requests[row], self._open[row]
        prompt_images = request.images[: len(request.images) - len(request.image_starts)]
        images = (*prompt_images, *response.images)
        asked = replace(
            request,
            begun=response.tokens,
            images=images,
            image_starts=response.image_starts,
            turn_start=response.turn_start,
        )
        if self._max_turn_tokens is not None:
            # An interrupted turn has some of its tokens.
            asked = replace(asked, limit=self._max_turn_tokens - len(response.tokens) + response.turn_start)
        self._queue.ask(row, asked)
