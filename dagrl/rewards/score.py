"""Calling a reward function on samples: what it is given, what it may return, and what happens when it fails."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from dagrl.spec.custom import reward_traits

SHOWN_CHARACTERS = 200
"""Of a prompt or a response in an error."""


LARGEST_REWARD = float(np.finfo(np.float32).max)


class RewardError(ValueError):
    """A reward function failed; the message names the sample, the function and the line of it."""


@dataclass(frozen=True, slots=True)
class Samples:
    """What reward functions are told of some samples; all of one length."""

    sample_id: Sequence[int]
    prompt: Sequence[str]
    response: Sequence[str]
    answer: Sequence[str]
    data_source: Sequence[str]
    extra_info: Sequence[Mapping[str, Any]]

    def __post_init__(self) -> None:
        lengths = {name: len(getattr(self, name)) for name in ("sample_id", *FIELDS)}
        assert len(set(lengths.values())) == 1, f"samples with columns of lengths {lengths}"

    def __len__(self) -> int:
        return len(self.sample_id)


FIELDS = ("prompt", "response", "answer", "data_source", "extra_info")
"""Keyword arguments that a reward function may ask for."""


@dataclass(frozen=True, slots=True)
class Scores:
    """What a reward function made of some samples."""

    rewards: np.ndarray
    """float32 [samples]."""
    failures: int
    """Samples that got the reward of ``on_error``."""
    first_failure: str | None
    """What the first of them failed of."""


def fields_of(function: Callable[..., Any], args: Mapping[str, Any]) -> tuple[str, ...]:
    """Which of `FIELDS` a reward function takes, by its parameters' names; all of them where it has ``**kwargs``.

    Raises ValueError where `args` do not fit the function, or it asks for what nobody gives.
    """
    name = _name(function)
    given = [field for field in FIELDS if field in args]
    if given:
        raise ValueError(f"args of the reward {name} may not set {given[0]!r}, which is the sample's")
    parameters = inspect.signature(function).parameters.values()
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    named = {each.name for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)}
    for parameter in parameters:
        if parameter.kind is parameter.POSITIONAL_ONLY:
            raise ValueError(f"the reward {name} takes {parameter.name!r} by position; arguments are given by name")
        if parameter.name in named and parameter.default is parameter.empty and parameter.name not in (*FIELDS, *args):
            raise ValueError(
                f"the reward {name} wants {parameter.name!r}, which is none of {', '.join(FIELDS)}; "
                "give it in the node's args"
            )
    unknown = [key for key in args if key not in named and not takes_any]
    if unknown:
        raise ValueError(f"the reward {name} has no parameter {unknown[0]!r}; remove it from the node's args")
    return FIELDS if takes_any else tuple(field for field in FIELDS if field in named)


def score(
    function: Callable[..., Any],
    samples: Samples,
    *,
    args: Mapping[str, Any],
    on_error: Literal["stop"] | float,
) -> Scores:
    """Rewards of `samples`: one call a sample, or one for all where the function is marked ``batched``.

    A sample fails when the function raises or does not return a finite number for it; a batched call fails as a whole
    when it raises or returns another number of rewards. With `on_error` ``stop`` the first failure is raised as a
    RewardError, otherwise failed samples get that reward and are counted. Raises ValueError like `fields_of`.
    """
    fields = fields_of(function, args)
    ledger = _Ledger(function, samples, on_error)
    if reward_traits(function).batched:
        _score_together(function, fields, args, ledger)
    else:
        _score_one_by_one(function, fields, args, ledger)
    return Scores(ledger.rewards, ledger.failures, ledger.first_failure)


def _score_one_by_one(
    function: Callable[..., Any], fields: Sequence[str], args: Mapping[str, Any], ledger: _Ledger
) -> None:
    for index in range(len(ledger.samples)):
        given = {field: getattr(ledger.samples, field)[index] for field in fields}
        try:
            result = function(**given, **args)
        except Exception as error:  # noqa: BLE001 - a user's function may raise anything, and on_error rules over it
            ledger.fail([index], _raised(function, error), error)
        else:
            ledger.enter(index, result)


def _score_together(
    function: Callable[..., Any], fields: Sequence[str], args: Mapping[str, Any], ledger: _Ledger
) -> None:
    everyone = range(len(ledger.samples))
    if not everyone:
        return
    try:
        results = _plain(function(**{field: list(getattr(ledger.samples, field)) for field in fields}, **args))
    except Exception as error:  # noqa: BLE001 - as above
        ledger.fail(everyone, _raised(function, error), error)
        return
    if not isinstance(results, Sequence) or isinstance(results, str):
        ledger.fail(everyone, f"returned {_shown(results)}; a batched reward returns a number for each sample")
    elif len(results) != len(everyone):
        ledger.fail(everyone, f"returned {len(results)} rewards for {len(everyone)} samples")
    else:
        for index, result in enumerate(results):
            ledger.enter(index, result)


class _Ledger:
    """The rewards as they come in, and what went wrong."""

    def __init__(self, function: Callable[..., Any], samples: Samples, on_error: Literal["stop"] | float) -> None:
        self.samples = samples
        self.rewards = np.zeros(len(samples), dtype=np.float32)
        self.failures = 0
        self.first_failure: str | None = None
        self._name = _name(function)
        self._on_error = on_error

    def enter(self, index: int, result: Any) -> None:
        """Take down a result, if it is a finite number."""
        number = _plain(result)
        if isinstance(number, bool) or not isinstance(number, int | float):
            self.fail([index], f"returned {_shown(result)}; a reward is a number, so use float(...)")
        elif not abs(number) <= LARGEST_REWARD:
            self.fail([index], f"returned {_shown(result)}; a reward is a finite number")
        else:
            self.rewards[index] = number

    def fail(self, indices: Sequence[int], what: str, cause: BaseException | None = None) -> None:
        """Give these samples the reward of ``on_error``, or stop."""
        message = f"reward {self._name} {what}\n{self._place(indices)}"
        if self._on_error == "stop":
            raise RewardError(message) from cause
        self.rewards[list(indices)] = self._on_error
        self.failures += len(indices)
        self.first_failure = self.first_failure or message

    def _place(self, indices: Sequence[int]) -> str:
        first, samples = indices[0], self.samples
        who = f"sample {samples.sample_id[first]}"
        if len(indices) > 1:
            who = f"samples {samples.sample_id[first]}..{samples.sample_id[indices[-1]]}, the first one's"
        return (
            f"  {who} data_source: {samples.data_source[first]}\n"
            f"  prompt: {_shown(samples.prompt[first])}\n"
            f"  response: {_shown(samples.response[first])}"
        )


def _raised(function: Callable[..., Any], error: Exception) -> str:
    """What was raised, and where: the innermost line in the function's own file, not the library below it."""
    frames = traceback.extract_tb(error.__traceback__)
    own_file = inspect.unwrap(function).__code__.co_filename if inspect.isfunction(inspect.unwrap(function)) else None
    frame = next((each for each in reversed(frames) if each.filename == own_file), frames[-1])
    return f"raised {type(error).__name__}: {error} ({frame.filename}:{frame.lineno})"


def _plain(value: Any) -> Any:
    """Arrays, tensors and their scalars as Python's own lists and numbers."""
    return value.tolist() if hasattr(value, "tolist") else value


def _shown(value: Any) -> str:
    text = repr(value)
    half = SHOWN_CHARACTERS // 2
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:half]} ... {text[-half:]}"


def _name(function: Callable[..., Any]) -> str:
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    return f"{module}:{name}" if module and name else repr(function)
