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
from dataclasses import replace

from dagrl.backends.base import GenerationRequest
from dagrl.backends.tool_calls import begins_reasoning
from dagrl.data.batch import Batch
from dagrl.ops.base import Context
from dagrl.ops.response import ABORTED, Response
from dagrl.ops.response_text import response_text
from dagrl.ops.turns.dialogue import LENGTH, PendingReply, Reply, ResponseDialogue
from dagrl.ops.turns.jobs import Done, Jobs
from dagrl.ops.turns.paused import PausedResponse, PausedResponses
from dagrl.ops.turns.requests import CallEnded, TurnDone, TurnRequests
from dagrl.ops.turns.settings import message_writer, row_fields, turn_settings

_GATHER_S = 0.01
"""How long an idle engine waits for further answers after one has arrived, to form a larger batch."""
_LOOK_EVERY_S = 0.1
"""How often an abort is looked for while tools and environments work: only an engine that samples reports it."""


def converse(
    batch: Batch, requests: Mapping[int, GenerationRequest], responses: Sequence[Response], context: Context
) -> Iterator[tuple[int, Response]]:
    """Yield the row and the finished response of each of `requests`, by row.

    After an abort unfinished responses are yielded as they are; with ``partial_rollout`` they and their environments
    wait for a later call. `responses` are empty, or say that one is outdated.
    """
    return Conversations(batch, requests, responses, context).run()


class Conversations:
    """The multi-turn responses of one call."""

    def __init__(
        self, batch: Batch, requests: Mapping[int, GenerationRequest], responses: Sequence[Response], context: Context
    ) -> None:
        node = context.rollout
        self._max_turns, self._sampling = node.max_turns, context.sampling
        self._max_turn_tokens = node.max_turn_tokens
        self._tokenizer = context.resources.tokenizer
        self._writer, others = message_writer(context), turn_settings(context)
        self._told_to_abort = context.aborted
        self._requests = dict(requests)
        self._open = {row: responses[row] for row in requests}
        self._dialogues = {
            row: ResponseDialogue(others, row_fields(batch, row, request.seed, context))
            for row, request in requests.items()
        }
        self._pending: dict[int, PendingReply] = {}
        """Pending replies by row."""
        self._rows_of_jobs: dict[int, tuple[int, int]] = {}
        """Job -> row and index in its pending reply."""
        self._finished: dict[int, Response] = {}
        self._context, self._groups = context, batch["group_id"].values
        self._keeps = node.partial_rollout and not context.validation
        self._paused = context.resources.once(f"paused responses of {context.sampled_by}", PausedResponses)
        self._aborted = False
        self._events: queue.SimpleQueue[TurnDone | CallEnded | Done] = queue.SimpleQueue()
        self._requests_queue = TurnRequests(context.generator, self._sampling, self._events.put)
        self._jobs = Jobs(self._events.put, max_running=node.tool_concurrency, timeout_s=node.tool_timeout_s)

    def run(self) -> Iterator[tuple[int, Response]]:
        try:
            yield from self._go_on()
            for row in self._open:
                self._ask(row)
            self._requests_queue.flush()
            # Answers that are on their way cannot be asked for again.
            while self._open and not (
                self._aborted and self._requests_queue.idle and not (self._keeps and self._pending)
            ):
                for event in self._next_events():
                    yield from self._take(event)
                self._aborted = self._aborted or self._told_to_abort()
                if not self._aborted:
                    self._requests_queue.flush()
            # A response that waits for a tool ended its turn, and is not finished.
            yield from [(row, replace(each, finish_reason=ABORTED)) for row, each in self._open.items()]
            if self._keeps:
                self._pause()
        finally:
            self._requests_queue.leave()
            for row in self._open:
                self._dialogues[row].leave()

    def _go_on(self) -> Iterator[tuple[int, Response]]:
        """Take the responses that an earlier call has paused; yield those that had ended."""
        context, node = self._context, self._context.rollout
        self._paused.leave_before(context.step - node.partial_rollout_max_age - context.pipeline.schedule.max_staleness)
        version = max(context.generator.policy_version, context.version)
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
        """Keep the responses of all groups that have an unfinished one."""
        for group in {int(self._groups[row]) for row in self._open}:
            rows = [row for row in sorted(self._requests) if self._groups[row] == group]
            kept = {**self._finished, **self._open}
            self._paused.put(
                (self._context.step, group), [PausedResponse(kept[row], self._dialogues[row]) for row in rows]
            )
        self._open.clear()

    def _finish(self, row: int, response: Response) -> tuple[int, Response]:
        del self._open[row]
        self._dialogues[row].leave()
        self._finished[row] = response
        return row, response

    def _next_events(self) -> list[TurnDone | CallEnded | Done]:
        """Wait for events, not for long. Engines and jobs have their own timeouts."""
        left_s = self._jobs.left_s()
        try:
            events = [self._events.get(timeout=_LOOK_EVERY_S if left_s is None else min(left_s, _LOOK_EVERY_S))]
        except queue.Empty:
            return list(self._jobs.late())
        until = time.monotonic() + _GATHER_S
        while True:
            gathers = self._requests_queue.idle and self._jobs.left_s() is not None
            try:
                events.append(self._events.get(timeout=max(0.0, until - time.monotonic()) if gathers else 0.0))
            except queue.Empty:
                return events

    def _take(self, event: TurnDone | CallEnded | Done) -> Iterator[tuple[int, Response]]:
        match event:
            case CallEnded():
                self._requests_queue.call_ended()
                if event.failure is not None:
                    raise event.failure
            case TurnDone():
                yield from self._turn_done(event)
            case Done():
                if self._jobs.settle(event):
                    row, index = self._rows_of_jobs.pop(event.job)
                    self._pending[row].ends[index] = event
                    yield from self._continue(row)

    def _turn_done(self, event: TurnDone) -> Iterator[tuple[int, Response]]:
        row, completion = event.row, event.completion
        response = self._open[row] = self._open[row].with_turn(completion)
        if completion.finish_reason == ABORTED:
            self._aborted = True
            return
        turn = response.turns[-1]
        cut = completion.finish_reason == LENGTH
        text = response_text(response.tokens[turn.begin : turn.end], self._context)
        last = len(response.turns) >= self._max_turns
        # The tokens that the turn continues: the prompt, or the answers to the turn before.
        context = response.tokens[: turn.begin] if turn.begin else self._requests[row].prompt
        thinks = begins_reasoning(self._tokenizer, context)
        pending = self._pending[row] = self._dialogues[row].respond(text, cut=cut, last=last, thinks=thinks)
        for index, work in enumerate(pending.work):
            if work is not None:
                self._rows_of_jobs[self._jobs.begin(work)] = row, index
        yield from self._continue(row)

    def _continue(self, row: int) -> Iterator[tuple[int, Response]]:
        """Continue or finish a response once its reply is complete."""
        reply = self._pending[row].reply
        if reply is None:
            return
        del self._pending[row]
        response = self._open[row].with_outcome(reward=reply.reward, calls=reply.calls, failed_calls=reply.failed_calls)
        following = self._with_answers(response, reply) if reply.ends is None else None
        if following is not None:
            self._open[row] = following
            self._ask(row)
            return
        yield self._finish(row, response.ended(reply.ends or LENGTH))

    def _with_answers(self, response: Response, reply: Reply) -> Response | None:
        """The response with the answers appended; None if no token could follow them."""
        tokens = self._writer.tokens(reply.answers, int(response.tokens[-1]))
        images = [image for answer in reply.answers for image in answer.images]
        following = response.with_observation(tokens, images, self._writer.image_starts(tokens, images))
        return following if len(following.tokens) < self._sampling.max_new_tokens else None

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
        self._requests_queue.ask(row, asked)
