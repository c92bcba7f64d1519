"""What follows a turn of the policy: the tools that it has called, a step of its environment, or the end."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dagrl.backends.tool_calls import Call, MalformedCall, Parser
from dagrl.graph.plugins.environment import EnvironmentClass, Observation
from dagrl.graph.plugins.tool import Tool, ToolArgumentError, ToolUnavailableError, offered
from dagrl.ops.turns.episode import Episode
from dagrl.ops.turns.jobs import Done, JobTimeoutError
from dagrl.ops.turns.template import Message

STOP, LENGTH, TURNS, ERROR = "stop", "length", "turns", "error"
"""Finish reasons: the policy or its environment has ended the response, there is no room left, there are no turns left,
the environment has failed."""


@dataclass(frozen=True, slots=True)
class TurnSettings:
    """Who may answer in a rollout: the same for all of its responses."""

    tools: Mapping[str, Tool]
    parse: Parser
    environment: EnvironmentClass | None
    max_parallel_calls: int
    ends_on_error: bool
    """Whether a failing environment ends the response instead of the run."""


@dataclass(frozen=True, slots=True)
class Reply:
    """What a turn has led to."""

    answers: tuple[Message, ...] = ()
    """What the policy is told."""
    ends: str | None = None
    """Finish reason, where the response ends with the turn; it is told nothing then."""
    reward: float = 0.0
    calls: int = 0
    failed_calls: int = 0


@dataclass(slots=True)
class PendingReply:
    """What a turn has asked for, until all of it is there: results in the order of the calls."""

    work: list[Callable[[], Any] | None]
    """To be run; None where the result is known already."""
    conclude: Callable[[Sequence[Done]], Reply]
    """From the ends of all work."""
    ends: dict[int, Done] = field(default_factory=dict)
    """Place -> how the work there ended."""

    def __post_init__(self) -> None:
        self.ends = {place: _NOTHING for place, work in enumerate(self.work) if work is None}

    @property
    def reply(self) -> Reply | None:
        """The outcome; None while work is under way. Raises what is to end the run."""
        if len(self.ends) < len(self.work):
            return None
        return self.conclude([self.ends[place] for place in range(len(self.work))])


_NOTHING = Done(0)


class ResponseDialogue:
    """Who one response talks to."""

    def __init__(self, others: TurnSettings, fields: Mapping[str, Any]) -> None:
        """`fields` of the row: those of `dagrl.graph.plugins.environment.RESET_FIELDS`."""
        self._others = others
        self._extra_info: Mapping[str, Any] = fields["extra_info"]
        self._offered = offered(others.tools, self._extra_info)
        self._episode = Episode(others.environment, fields) if others.environment else None

    def hear(self, text: str, *, cut: bool, last: bool) -> PendingReply:
        """What a turn leads to: `text` is what was said, `cut` off where it is, `last` where no turn may follow.

        A turn that calls tools is for them alone; any other is for the environment, if there is one.
        """
        calls = self._others.parse(text) if self._others.tools and not cut else []
        over = LENGTH if cut else TURNS if last else None
        if calls:
            return PendingReply([], lambda _: Reply(ends=TURNS)) if last else self._called(calls)
        if self._episode is None:
            return PendingReply([], lambda _: Reply(ends=LENGTH if cut else STOP))
        episode = self._episode
        return PendingReply([lambda: episode.step(text, last=last or cut)], lambda ends: self._observed(ends[0], over))

    def leave(self) -> None:
        """The response is over, or nobody wants it any more."""
        if self._episode is not None:
            self._episode.leave()

    # -- tools

    def _called(self, calls: Sequence[Call | MalformedCall]) -> PendingReply:
        refusals = [self._refusal(number, call) for number, call in enumerate(calls)]
        work = [None if refusal else self._work(call) for refusal, call in zip(refusals, calls, strict=True)]

        def conclude(ends: Sequence[Done]) -> Reply:
            texts = [refusal or tool_answer(end) for refusal, end in zip(refusals, ends, strict=True)]
            failed = sum(bool(refusal) or end.failure is not None for refusal, end in zip(refusals, ends, strict=True))
            answers = tuple(Message("tool", text) for text in texts)
            return Reply(answers, calls=len(calls), failed_calls=failed)

        return PendingReply(work, conclude)

    def _refusal(self, number: int, call: Call | MalformedCall) -> str:
        """What the policy is told of a call that is not to be run; empty for others."""
        if number >= self._others.max_parallel_calls:
            return f"Error: of one turn's calls only the first {self._others.max_parallel_calls} are answered."
        if isinstance(call, MalformedCall):
            return f"Error: {call.why}"
        if call.name not in self._offered:
            there = f", only {', '.join(self._offered)}" if self._offered else ""
            return f"Error: there is no tool {call.name!r}{there}."
        return ""

    def _work(self, call: Call | MalformedCall) -> Callable[[], Any]:
        assert isinstance(call, Call)
        tool = self._offered[call.name]
        return lambda: tool.call(call.arguments, self._extra_info)

    # -- environment

    def _observed(self, end: Done, over: str | None) -> Reply:
        if end.failure is not None:
            assert self._episode is not None
            failure = self._episode.failure(end.failure)
            if self._others.ends_on_error:
                return Reply(ends=ERROR)
            raise failure from end.failure
        observation: Observation = end.result
        if observation.ends or over is not None:
            return Reply(ends=STOP if observation.ends and over != LENGTH else over, reward=observation.reward)
        return Reply((Message("user", str(observation.text)),), reward=observation.reward)


def tool_answer(end: Done) -> str:
    """What the policy is told of a call. ToolUnavailableError where the run is to end."""
    failure = end.failure
    if failure is None:
        return end.result if isinstance(end.result, str) else _as_json(end.result)
    if isinstance(failure, ToolUnavailableError):
        raise failure
    if type(failure) in (ValueError, ToolArgumentError, JobTimeoutError):
        return f"Error: {failure}"
    return f"Error: {type(failure).__name__}: {failure}"


def _as_json(result: Any) -> str:
    """In Python's own words where JSON has none: for keys that are tuples, for what holds itself."""
    try:
        return json.dumps(result, ensure_ascii=False, default=str)
    except (TypeError, ValueError):
        return str(result)
