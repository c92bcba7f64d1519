"""Calls a reward function on samples, checks its results and handles its failures."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal, TypeGuard

import numpy as np

from dagrl.config.errors import counted
from dagrl.plugins.calls import UserFunctionError, call
from dagrl.plugins.custom import located, name_of
from dagrl.plugins.declarations import FIELDS, fields_of, reward_traits

SHOWN_CHARACTERS = 200
"""Longest excerpt of a prompt or response in an error."""


_SCORES = ("score", "reward")
"""Keys of a dict that hold its reward."""
_NAME = re.compile(r"[A-Za-z_][\w.@-]{0,99}")
LARGEST_REWARD = float(np.finfo(np.float32).max)


class RewardError(ValueError):
    """A reward function failed; the message names the sample, the function and its line."""


@dataclass(frozen=True, slots=True)
class Samples:
    """Arguments of reward functions for some samples; all of one length."""

    sample_id: Sequence[int]
    prompt: Sequence[str]
    response: Sequence[str]
    answer: Sequence[str]
    data_source: Sequence[str]
    extra_info: Sequence[Mapping[str, Any]]
    finish_reason: Sequence[str] = ()
    """Why each response ended: ``length`` where a limit cut it. Default: ``stop``."""
    turns: Sequence[Sequence[str]] = ()
    """Texts of the policy's turns. Default: one turn, the response."""
    turn_rewards: Sequence[Sequence[float]] = ()
    """Rewards that an environment gave for the turns. Default: none."""
    agent_reward: Sequence[float | None] = ()
    """Reward that an agent gave. Default: none."""

    def __post_init__(self) -> None:
        if not self.finish_reason:
            object.__setattr__(self, "finish_reason", ["stop"] * len(self.response))
        if not self.turns:
            object.__setattr__(self, "turns", [[said] for said in self.response])
        if not self.turn_rewards:
            object.__setattr__(self, "turn_rewards", [[]] * len(self.response))
        if not self.agent_reward:
            object.__setattr__(self, "agent_reward", [None] * len(self.response))
        lengths = {name: len(getattr(self, name)) for name in ("sample_id", *FIELDS)}
        assert len(set(lengths.values())) == 1, f"samples with columns of lengths {lengths}"

    def __len__(self) -> int:
        return len(self.sample_id)


@dataclass(frozen=True, slots=True)
class RewardScores:
    """Results of a reward function for some samples."""

    rewards: np.ndarray
    """float32 [samples]."""
    failures: int
    """Number of samples that got the reward of ``on_error``."""
    unavailable: int
    """Number of these for which the function raised an OSError: no sandbox, or no answer of a service."""
    further: Sequence[Mapping[str, float | str]]
    """For each sample, the other numbers and texts of a dict that the function returned."""


def score(
    function: Callable[..., Any],
    samples: Samples,
    *,
    args: Mapping[str, Any],
    on_error: Literal["stop"] | float,
    concurrency: int | None = None,
) -> RewardScores:
    """Rewards of `samples`: one call per sample, or one for all if the function is marked ``batched``.

    `concurrency` samples are scored at a time; the default is the function's mark. Errors and counts do not depend on
    it.

    The function returns a number, or a dict in which `score` or `reward` is the number. A sample fails if the function
    raises or returns no finite number for it; a batched call fails as a whole if it raises or returns another number of
    rewards. With `on_error` ``stop`` the first failure is raised as a RewardError; otherwise failed samples get that
    reward and are counted. A KeyboardInterrupt is always raised as one. Raises ValueError as `fields_of` does.
    """
    fields = fields_of(function, args)
    ledger = _Ledger(function, samples, on_error)
    traits = reward_traits(function)
    if traits.batched:
        _score_together(function, fields, args, ledger)
    else:
        calls = (ledger.called(fields, index, args) for index in range(len(samples)))
        _score_each(calls, ledger, concurrency or traits.concurrency)
    return RewardScores(ledger.rewards, ledger.failures, ledger.unavailable, ledger.further)


def _score_each(calls: Iterable[Callable[[], object]], ledger: _Ledger, at_once: int) -> None:
    """Enter the results of all calls in order; with `at_once` above 1 they run in threads."""
    if at_once == 1:
        for index, call_one in enumerate(calls):
            ledger.enter_result_of(index, call_one)
        return
    with ThreadPoolExecutor(at_once, thread_name_prefix="reward") as pool:
        running = [pool.submit(call_one) for call_one in calls]
        try:
            for index, future in enumerate(running):
                ledger.enter_result_of(index, future.result)
        except RewardError:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _score_together(
    function: Callable[..., object], fields: Mapping[str, str], args: Mapping[str, object], ledger: _Ledger
) -> None:
    everyone = range(len(ledger.samples))
    if not everyone:
        return
    columns = {name: list(getattr(ledger.samples, field)) for name, field in fields.items()}
    try:
        given = call(function, {**columns, **args}, about=ledger.who(everyone))
        results = _listed(given)
    except UserFunctionError as error:
        ledger.fail(everyone, str(error), error.__cause__)
    except _UnusableError as error:
        ledger.fail(everyone, str(error))
    else:
        if len(results) != len(everyone):
            ledger.fail(everyone, f"returned {counted(len(results), 'reward')} for {counted(len(everyone), 'sample')}")
            return
        for index, result in enumerate(results):
            ledger.enter(index, result)


class _Ledger:
    """Collects rewards and failures."""

    def __init__(self, function: Callable[..., object], samples: Samples, on_error: Literal["stop"] | float) -> None:
        self.samples = samples
        self.rewards = np.zeros(len(samples), dtype=np.float32)
        self.failures = self.unavailable = 0
        self.further: list[dict[str, float | str]] = [{} for _ in range(len(samples))]
        self._function = function
        self._on_error = on_error

    def called(self, fields: Mapping[str, str], index: int, args: Mapping[str, Any]) -> Callable[[], Any]:
        given = {name: getattr(self.samples, field)[index] for name, field in fields.items()}
        return lambda: call(self._function, {**given, **args}, about=self.who([index]))

    def enter_result_of(self, index: int, call_one: Callable[[], object]) -> None:
        """Record the result of a call, or its failure."""
        try:
            result = call_one()
        except UserFunctionError as error:
            self.fail([index], str(error), error.__cause__)
        else:
            self.enter(index, result)

    def enter(self, index: int, result: object) -> None:
        """Record a result, if it is a finite number, or a dict with one."""
        try:
            self.rewards[index], self.further[index] = _read(result)
        except _UnusableError as error:
            self.fail([index], str(error))

    def fail(self, indices: Sequence[int], what: str, cause: BaseException | None = None) -> None:
        """Assign these samples the reward of ``on_error``, or stop."""
        # Exceptions have their own line number.
        who = located(self._function) if cause is None else name_of(self._function)
        message = f"reward {who} {what}\n{self._place(indices)}"
        if self._on_error == "stop" or isinstance(cause, KeyboardInterrupt):
            raise RewardError(message) from cause
        self.rewards[list(indices)] = self._on_error
        self.failures += len(indices)
        self.unavailable += len(indices) * isinstance(cause, OSError)

    def _place(self, indices: Sequence[int]) -> str:
        first, samples = indices[0], self.samples
        which = ", the first one's" if len(indices) > 1 else ""
        return (
            f"  {self.who(indices)}{which} data_source: {samples.data_source[first]}\n"
            f"  prompt: {_shown(samples.prompt[first])}\n"
            f"  response: {_shown(samples.response[first])}"
        )

    def who(self, indices: Sequence[int]) -> str:
        first, last = (self.samples.sample_id[index] for index in (indices[0], indices[-1]))
        return f"sample {first}" if len(indices) == 1 else f"samples {first}..{last}"


class _UnusableError(ValueError):
    """A function returned no reward; the message shows its result."""


@contextmanager
def _reading(result: Any) -> Iterator[None]:
    """Reading a result may run code of its class, which may raise anything."""
    try:
        yield
    except _UnusableError:
        raise
    except BaseException as error:  # as above
        raise _UnusableError(
            f"returned a {type(result).__name__} that cannot be read ({type(error).__name__}); use float(...)"
        ) from error


def _read(result: object) -> tuple[float, dict[str, float | str]]:
    with _reading(result):
        given, further = _plain(result), {}
        if isinstance(given, Mapping):
            keys = [key for key in _SCORES if key in given]
            if len(keys) != 1:
                which = "neither `score` nor `reward`" if not keys else "both `score` and `reward`"
                raise _UnusableError(f"returned a dict with {which}: {_shown(result)}; it needs one of them")
            given, further = given[keys[0]], _further(given, keys[0])
        number = None if isinstance(given, bool) else _number(given)
        if number is None:
            raise _UnusableError(f"returned {_shown(result)}; a reward must be a number, so use float(...)")
        if not abs(number) <= LARGEST_REWARD:
            raise _UnusableError(f"returned {_shown(result)}; a reward must be a finite number")
        return number, further


def _listed(results: object) -> list[object]:
    with _reading(results):
        given = _plain(results)
        if not isinstance(given, Sequence) or isinstance(given, str):
            raise _UnusableError(f"returned {_shown(results)}; a batched reward returns a number for each sample")
        return [*islice(given, len(given))]


def _further(given: Mapping[object, object], score: str) -> dict[str, float | str]:
    """The texts and finite numbers of a dict beside its score, a bool as 0 or 1; other values are left out."""
    named = [
        (str.__str__(key), str.__str__(value) if isinstance(value, str) else _number(value))
        for key, value in given.items()
        if isinstance(key, str)
    ]
    return {key: value for key, value in named if key != score and _is_usable(value) and _NAME.fullmatch(key)}


def _is_usable(value: float | str | None) -> TypeGuard[float | str]:
    return isinstance(value, str) or (value is not None and abs(value) <= LARGEST_REWARD)


def _number(value: object) -> float | None:
    """A number as a float, without the comparisons of a subclass; None for another value."""
    value = _plain(value)
    if not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _plain(value: object) -> object:
    """Convert arrays, tensors and their scalars to Python lists and numbers."""
    return value.tolist() if hasattr(value, "tolist") else value


def _shown(value: Any) -> str:
    try:
        text = repr(value)
    except BaseException:  # noqa: BLE001 - a user's __repr__ may raise anything
        text = f"a {type(value).__name__}"
    half = SHOWN_CHARACTERS // 2
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:half]} ... {text[-half:]}"
