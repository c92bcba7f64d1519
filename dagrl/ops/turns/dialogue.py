"""Decides what follows a turn of the policy: tool calls, a step of its environment, or the end."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dagrl.backends.tool_calls import Call, MalformedCall, Parser
from dagrl.model_files.images import ImageSettings, is_image, resized
from dagrl.ops.turns.jobs import JobResult, JobTimeoutError
from dagrl.ops.turns.template import Answer
from dagrl.plugins.calls import within_call
from dagrl.plugins.custom import raised_by
from dagrl.plugins.environment import Environment, EnvironmentClass, Observation
from dagrl.plugins.tool import Tool, ToolArgumentError, ToolUnavailableError, offered
from dagrl.tools.mcp import McpTool


class NoObservationError(TypeError):
    """An environment's `step` did not return an Observation."""


class Episode:
    """One environment, used by one thread at a time."""

    def __init__(self, made_of: EnvironmentClass, fields: Mapping[str, object]) -> None:
        self._made_of = made_of
        self._fields = {name: fields[name] for name in made_of.fields}
        self._environment: Environment | None = None
        self._lock = threading.Lock()
        self._asked = self._closed = False

    def step(self, text: str, *, last: bool) -> Observation:
        """The environment's observation; after the `last` step it is closed. Raises exceptions of the user's class."""
        self._asked = True
        with self._lock, within_call(self._made_of.make):
            assert not self._closed, "step after close"
            if self._environment is None:
                self._environment = self._made_of()
                self._environment.reset(**self._fields)
            observation = self._environment.step(text)
            if not isinstance(observation, Observation):
                raise NoObservationError(f"step returned {observation!r}; return a dagrl.Observation")
        if last or observation.ends:
            self.close()
        return observation

    def close(self) -> None:
        with self._lock, within_call(self._made_of.make):
            if self._closed:
                return
            self._closed = True
            close = getattr(self._environment, "close", None)
            if close is not None:
                close()

    def leave(self) -> None:
        if self._asked and not self._closed:
            threading.Thread(target=self.close, daemon=True).start()

    def failure(self, cause: BaseException) -> Exception:
        who = f"the environment `{self._made_of.place}`"
        if isinstance(cause, JobTimeoutError):
            return TimeoutError(f"{who} gave {cause}; raise `tool_timeout_s`")
        if isinstance(cause, NoObservationError):
            return TypeError(f"{who}: {cause}")
        return ValueError(f"{who} {raised_by(self._made_of.make.step, cause)}")


AnswerContent = str | tuple[Any, ...]
"""A text, or texts and images (PIL) in order."""
STOP, LENGTH, TURNS, ERROR = "stop", "length", "turns", "error"
"""Finish reasons: end token or environment, no tokens left, no turns left, failed environment."""


@dataclass(frozen=True, slots=True)
class TurnSettings:
    """Tools and environment of a rollout, shared by all of its responses."""

    tools: Mapping[str, Tool | McpTool]
    parse: Parser
    environment: EnvironmentClass | None
    max_parallel_calls: int
    ends_on_error: bool
    """Whether a failing environment ends the response instead of the run."""
    vision: ImageSettings | None = None
    """Not None if answers may have images."""


@dataclass(frozen=True, slots=True)
class TurnOutcome:
    """Outcome of a turn."""

    answers: tuple[Answer, ...] = ()
    """Messages to the policy."""
    ends: str | None = None
    """Finish reason if the response ends with the turn, without `answers`."""
    reward: float = 0.0
    calls: int = 0
    failed_calls: int = 0


@dataclass(slots=True)
class PendingOutcome:
    """Jobs started by a turn; results are kept in the order of the calls."""

    work: list[Callable[[], object] | None]
    """None for a call whose result needs no job."""
    conclude: Callable[[Sequence[JobResult]], TurnOutcome]
    results: dict[int, JobResult] = field(default_factory=dict)
    """Results by index of the job."""

    def __post_init__(self) -> None:
        self.results = {place: JobResult(0) for place, work in enumerate(self.work) if work is None}

    @property
    def outcome(self) -> TurnOutcome | None:
        """The outcome; None until all jobs have ended. Raises errors that end the run."""
        if len(self.results) < len(self.work):
            return None
        return self.conclude([self.results[place] for place in range(len(self.work))])


class ResponseDialogue:
    """The tools and the environment of one response."""

    def __init__(self, settings: TurnSettings, fields: Mapping[str, Any]) -> None:
        """`fields` of the row: `dagrl.plugins.environment.RESET_FIELDS`."""
        self._settings = settings
        self._extra_info: Mapping[str, Any] = fields["extra_info"]
        self._offered = offered(settings.tools, self._extra_info)
        self._episode = Episode(settings.environment, fields) if settings.environment else None

    def respond(self, text: str, *, cut: bool, last: bool, thinks: bool = False) -> PendingOutcome:
        """Respond to a turn's `text`, which a length limit may have `cut` off, or which is the `last` allowed turn.

        A turn with tool calls goes to the tools alone, any other to the environment, if there is one. `thinks`: the
        prompt has begun the turn's reasoning.
        """
        calls = self._settings.parse(text, thinks=thinks) if self._settings.tools and not cut else []
        if calls and not last:
            return self._start_calls(calls)
        episode = self._episode
        if calls or episode is None:
            ends = TURNS if calls else LENGTH if cut else STOP
            return PendingOutcome([], lambda _: TurnOutcome(ends=ends))
        over = LENGTH if cut else TURNS if last else None
        return PendingOutcome(
            [lambda: episode.step(text, last=over is not None)], lambda results: self._observed(results[0], over)
        )

    def leave(self) -> None:
        if self._episode is not None:
            self._episode.leave()

    # -- tools

    def _start_calls(self, calls: Sequence[Call | MalformedCall]) -> PendingOutcome:
        refusals = [self._refusal(number, call) for number, call in enumerate(calls)]
        work = [None if refusal else self._work(call) for refusal, call in zip(refusals, calls, strict=True)]

        def conclude(results: Sequence[JobResult]) -> TurnOutcome:
            ended = [*zip(calls, refusals, results, strict=True)]
            answers = tuple(
                self._answer("tool", refusal or tool_answer(result), call) for call, refusal, result in ended
            )
            failed = sum(bool(refusal) or result.failure is not None for _, refusal, result in ended)
            return TurnOutcome(answers, calls=len(calls), failed_calls=failed)

        return PendingOutcome(work, conclude)

    def _refusal(self, number: int, call: Call | MalformedCall) -> str:
        """Error message for a call that is not run; empty if it is run."""
        most = self._settings.max_parallel_calls
        if number >= most:
            first = "call of a turn is" if most == 1 else f"{most} calls of a turn are"
            return f"Error: only the first {first} answered."
        if isinstance(call, MalformedCall):
            return f"Error: {call.why}"
        if call.name not in self._offered:
            others = f", only {', '.join(self._offered)}" if self._offered else ""
            return f"Error: there is no tool {call.name!r}{others}."
        return ""

    def _work(self, call: Call | MalformedCall) -> Callable[[], object]:
        assert isinstance(call, Call)
        tool = self._offered[call.name]
        return lambda: tool.call(call.arguments, self._extra_info)

    # -- environment

    def _observed(self, result: JobResult, over: str | None) -> TurnOutcome:
        if result.failure is not None:
            assert self._episode is not None
            if self._settings.ends_on_error:
                return TurnOutcome(ends=ERROR)
            raise self._episode.failure(result.failure) from result.failure
        observation: Observation = result.result
        if observation.ends or over is not None:
            return TurnOutcome(ends=STOP if observation.ends and over != LENGTH else over, reward=observation.reward)
        answer = self._answer("user", (str(observation.text), *observation.images))
        return TurnOutcome((answer,), reward=observation.reward)

    def _answer(self, role: str, answer: AnswerContent, call: Call | MalformedCall | None = None) -> Answer:
        """The texts and images of an answer as a message. ValueError for an image if prompts have none."""
        name, call_id = (call.name, call.id) if isinstance(call, Call) else ("", "")
        if isinstance(answer, str):
            return Answer(role, answer, name=name, call_id=call_id)
        images = [part for part in answer if not isinstance(part, str)]
        vision = self._settings.vision
        if images and vision is None:
            raise ValueError(
                "a tool or environment answers with an image, but prompts have no images; set data.image_key"
            )
        pixels = tuple(resized(image, vision) for image in images) if vision else ()
        text = "".join(part for part in answer if isinstance(part, str))
        return Answer(role, text, pixels, name=name, call_id=call_id)


def tool_answer(job: JobResult) -> AnswerContent:
    """A tool's result or failure as text, or as texts and images. Raises ToolUnavailableError, which ends the run."""
    failure = job.failure
    if failure is None:
        result = job.result
        parts = result if isinstance(result, list | tuple) else [result]
        if any(map(is_image, parts)) and all(isinstance(part, str) or is_image(part) for part in parts):
            return tuple(parts)
        return result if isinstance(result, str) else _as_json(result)
    if isinstance(failure, ToolUnavailableError):
        raise failure
    if type(failure) in (ValueError, ToolArgumentError, JobTimeoutError):
        return f"Error: {failure}"
    return f"Error: {type(failure).__name__}: {failure}"


def _as_json(result: object) -> str:
    """Falls back to `str` for objects that JSON cannot represent, such as tuple keys and cycles."""
    try:
        return json.dumps(result, ensure_ascii=False, default=str)
    except (TypeError, ValueError):
        return str(result)
