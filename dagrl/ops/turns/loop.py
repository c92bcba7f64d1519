"""The loop of a rollout of several turns: turns come from the engine, answers from tools and environments.

    engine --turn--> partner --work--> jobs
       ^                                 |
       +------ prompt, all so far <------+   answers, as tokens

Everything is decided in one thread, that which takes the responses; others only wait for an engine or a tool.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Iterator, Mapping, Sequence

from dagrl.backends.base import GenerationRequest
from dagrl.data.batch import Batch
from dagrl.ops.base import Context
from dagrl.ops.response import ABORTED, Response
from dagrl.ops.turns.answers import LENGTH, PendingReply, Reply, ResponseDialogue
from dagrl.ops.turns.asking import CallEnded, TurnDone, TurnRequests
from dagrl.ops.turns.jobs import Done, Jobs
from dagrl.ops.turns.setting import answer_writer, others_of, row_fields

_GATHER_S = 0.01
"""How long an idle engine waits for further answers after one has come: together they are a larger batch."""


def converse(
    batch: Batch, requests: Mapping[int, GenerationRequest], responses: Sequence[Response], context: Context
) -> Iterator[tuple[int, Response]]:
    """Yield the place in `batch` and the response for each of `requests`, by place, as they come to their ends.

    After an abort those that have not are left out. `responses` holds what there is to begin with.
    """
    return Conversations(batch, requests, responses, context).run()


class Conversations:
    """Responses of several turns under way."""

    def __init__(
        self, batch: Batch, requests: Mapping[int, GenerationRequest], responses: Sequence[Response], context: Context
    ) -> None:
        node = context.rollout
        self._max_turns, self._sampling = node.max_turns, context.sampling
        self._tokenizer = context.resources.tokenizer
        self._writer, others = answer_writer(context), others_of(context)
        self._requests = dict(requests)
        self._open = {row: responses[row] for row in requests}
        self._partners = {
            row: ResponseDialogue(others, row_fields(batch, row, request.seed, context))
            for row, request in requests.items()
        }
        self._exchanges: dict[int, PendingReply] = {}
        """Of responses whose last turn is being answered."""
        self._asked_by: dict[int, tuple[int, int]] = {}
        """Job -> the response, and the place in its exchange."""
        self._aborted = False
        self._events: queue.SimpleQueue[TurnDone | CallEnded | Done] = queue.SimpleQueue()
        self._asking = TurnRequests(context.engine, self._sampling, self._events.put)
        self._jobs = Jobs(self._events.put, at_once=node.tool_concurrency, timeout_s=node.tool_timeout_s)

    def run(self) -> Iterator[tuple[int, Response]]:
        """See `converse`."""
        try:
            for row in self._open:
                self._ask(row)
            self._asking.hand_over()
            while self._open and not (self._aborted and self._asking.idle):
                for event in self._next_events():
                    yield from self._take(event)
                if not self._aborted:
                    self._asking.hand_over()
        finally:
            self._asking.leave()
            for row in self._open:
                self._partners[row].leave()

    def _next_events(self) -> list[TurnDone | CallEnded | Done]:
        """What has happened; nothing is left to wait for that is not bounded: an engine bounds its own calls."""
        try:
            events = [self._events.get(timeout=self._jobs.left_s())]
        except queue.Empty:
            return list(self._jobs.late())
        until = time.monotonic() + _GATHER_S
        while True:
            gathers = self._asking.idle and self._jobs.left_s() is not None
            try:
                events.append(self._events.get(timeout=max(0.0, until - time.monotonic()) if gathers else 0.0))
            except queue.Empty:
                return events

    def _take(self, event: TurnDone | CallEnded | Done) -> Iterator[tuple[int, Response]]:
        match event:
            case CallEnded():
                self._asking.over()
                if event.failure is not None:
                    raise event.failure
            case TurnDone():
                yield from self._heard(event)
            case Done():
                if self._jobs.settle(event):
                    row, place = self._asked_by.pop(event.job)
                    self._exchanges[row].ends[place] = event
                    yield from self._go_on(row)

    def _heard(self, said: TurnDone) -> Iterator[tuple[int, Response]]:
        row, completion = said.row, said.completion
        response = self._open[row] = self._open[row].spoken(completion)
        if completion.finish_reason == ABORTED:
            self._aborted = True
            return
        turn = response.turns[-1]
        cut = completion.finish_reason == LENGTH
        # The token that has ended the turn is no part of what was said.
        text = self._tokenizer.decode(response.tokens[turn.begin : turn.end if cut else turn.end - 1])
        last = len(response.turns) >= self._max_turns
        exchange = self._exchanges[row] = self._partners[row].hear(text, cut=cut, last=last)
        for place, work in enumerate(exchange.work):
            if work is not None:
                self._asked_by[self._jobs.begin(work)] = row, place
        yield from self._go_on(row)

    def _go_on(self, row: int) -> Iterator[tuple[int, Response]]:
        """Let a response go on, or end, if all that it waits for is there."""
        reply = self._exchanges[row].reply
        if reply is None:
            return
        del self._exchanges[row]
        response = self._open[row].settled(reward=reply.reward, calls=reply.calls, failed_calls=reply.failed_calls)
        following = self._followed(response, reply) if reply.ends is None else None
        if following is not None:
            self._open[row] = following
            self._ask(row)
            return
        del self._open[row]
        self._partners[row].leave()
        yield row, response.ended(reply.ends or LENGTH)

    def _followed(self, response: Response, reply: Reply) -> Response | None:
        """With the answers behind it; None where there is no room for them and a further token."""
        following = response.answered(self._writer.tokens(reply.answers, int(response.tokens[-1])))
        return following if len(following.tokens) < self._sampling.max_new_tokens else None

    def _ask(self, row: int) -> None:
        request = self._requests[row]
        self._asking.ask(row, GenerationRequest(request.prompt, request.seed, self._open[row].tokens))
