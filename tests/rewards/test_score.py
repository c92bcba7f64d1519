"""Reward functions get what they ask for by name, and their failures are named or counted."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import dagrl
from dagrl.rewards.score import RewardError, Samples, fields_of, score


def samples(count: int = 3) -> Samples:
    numbers = range(count)
    return Samples(
        sample_id=[10 + number for number in numbers],
        prompt=[f"prompt {number}" for number in numbers],
        response=[str(number) for number in numbers],
        answer=["1"] * count,
        data_source=["demo"] * count,
        extra_info=[{"bonus": number / 2} for number in numbers],
    )


def stop(function: Callable[..., Any], **args: Any) -> list[float]:
    scores = score(function, samples(), args=args, on_error="stop")
    assert scores.failures == 0
    assert scores.rewards.dtype == np.float32
    return scores.rewards.tolist()


def test_arguments_are_given_by_name() -> None:
    assert stop(lambda answer, response: int(response == answer)) == [0, 1, 0]
    assert stop(lambda extra_info, prompt: extra_info["bonus"] + int(prompt[-1])) == [0, 1.5, 3]
    assert stop(lambda *, data_source, scale, shift=1.0: len(data_source) * scale + shift, scale=2) == [9, 9, 9]
    assert stop(lambda **everything: len(everything), weight=0) == [10, 10, 10]
    assert stop(lambda: 0.25) == [0.25, 0.25, 0.25]


def test_a_batched_function_is_called_once_with_lists() -> None:
    calls = []

    @dagrl.reward(batched=True)
    def by_length(response: list[str], extra_info: list[dict], power: int) -> np.ndarray:
        calls.append(len(response))
        return np.array([int(text) ** power + info["bonus"] for text, info in zip(response, extra_info, strict=True)])

    assert stop(by_length, power=2) == [0, 1.5, 5]
    assert calls == [3]
    assert score(by_length, samples(0), args={"power": 1}, on_error="stop").rewards.shape == (0,)
    assert calls == [3]


def verls(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict | None = None, **kwargs: Any
) -> dict:
    assert (data_source, kwargs["response"]) == ("demo", solution_str)
    return {"score": float(solution_str == ground_truth), "acc": solution_str == ground_truth, "pred": solution_str}


def verls_batch(data_sources: list, solution_strs: list, ground_truths: list, extra_infos: list) -> list[float]:
    assert data_sources == ["demo"] * 3 and extra_infos[1] == {"bonus": 0.5}
    return [float(said == right) for said, right in zip(solution_strs, ground_truths, strict=True)]


def test_verls_names_of_arguments_are_understood() -> None:
    assert stop(verls) == [0, 1, 0]
    assert stop(dagrl.reward(batched=True)(verls_batch)) == [0, 1, 0]
    assert stop(dagrl.reward(batched=True)(lambda solution_str, ground_truth: [len(solution_str)] * 3)) == [3, 3, 3]
    assert stop(lambda response, ground_truth: float(response == ground_truth)) == [0, 1, 0]
    assert stop(lambda response, ground_truth: float(response == ground_truth), ground_truth="2") == [0, 0, 1]


def test_a_dict_has_a_reward_and_further_numbers_and_texts() -> None:
    scores = score(verls, samples(), args={}, on_error="stop")
    assert scores.rewards.tolist() == [0, 1, 0]
    assert scores.further == [{"acc": 0, "pred": "0"}, {"acc": 1, "pred": "1"}, {"acc": 0, "pred": "2"}]

    def rewards(response: str) -> dict:
        others = {"length": np.int64(1), "nan": math.nan, "text": "x", "none": None, "a/b": 1, 3: 1, "list": [1]}
        return {"reward": np.float32(response), **others}

    scores = score(rewards, samples(), args={}, on_error="stop")
    assert (scores.rewards.tolist(), scores.further) == ([0, 1, 2], [{"length": 1, "text": "x"}] * 3)
    batched = dagrl.reward(batched=True)(lambda response: [{"score": 1.0, "a": 2}, 0.5, {"score": 0}])
    scores = score(batched, samples(), args={}, on_error="stop")
    assert (scores.rewards.tolist(), scores.further) == ([1, 0.5, 0], [{"a": 2}, {}, {}])


@pytest.mark.parametrize(
    ("result", "what"),
    [
        ({}, "a dict with neither `score` nor `reward`"),
        ({"acc": 1.0}, "a dict with neither `score` nor `reward`"),
        ({"score": 1.0, "reward": 0.0}, "a dict with both `score` and `reward`"),
        ({"score": "1"}, "a reward must be a number"),
        ({"score": True}, "a reward must be a number"),
        ({"reward": math.nan}, "a reward must be a finite number"),
    ],
)
def test_a_dict_without_a_reward_is_a_failure(result: dict, what: str) -> None:
    with pytest.raises(RewardError, match=what):
        stop(lambda: result)
    scores = score(lambda: result, samples(), args={}, on_error=-1.0)
    assert (scores.rewards.tolist(), scores.failures, scores.further) == ([-1, -1, -1], 3, [{}, {}, {}])


def test_several_samples_may_be_scored_at_once() -> None:
    everyone = threading.Barrier(3, timeout=120)

    @dagrl.reward(concurrency=3)
    def together(response: str) -> float:
        everyone.wait()
        return float(response) ** 2

    assert stop(together) == [0, 1, 4]

    def alone(response: str) -> float:
        everyone.wait()
        return float(response)

    assert score(alone, samples(), args={}, on_error="stop", concurrency=3).rewards.tolist() == [0, 1, 2]


@pytest.mark.parametrize("on_error", ["stop", -1.0])
def test_simultaneous_failures_are_reported_like_single_ones(on_error: Any) -> None:
    def fails_later(response: str) -> float:
        time.sleep(0.2 if response == "1" else 0)
        if response in "12":
            raise KeyError(response)
        return 1.0

    def told(concurrency: int) -> tuple:
        try:
            scores = score(fails_later, samples(4), args={}, on_error=on_error, concurrency=concurrency)
        except RewardError as error:
            return (str(error),)
        return scores.rewards.tolist(), scores.failures

    assert told(4) == told(1)
    assert told(4) == ([1.0, -1.0, -1.0, 1.0], 2) or "KeyError: '1'" in str(told(4))


def test_marks_that_contradict_each_other_are_refused() -> None:
    for marks in ({"concurrency": 0}, {"concurrency": 2, "batched": True}):
        with pytest.raises(ValueError, match="concurrency is 1 or more, and 1 where it is batched"):
            dagrl.reward(**marks)


@pytest.mark.parametrize("number", [1, 1.0, np.float32(1), np.int64(1), np.array(1.0)])
def test_numbers_of_any_make_are_rewards(number: Any) -> None:
    assert stop(lambda: number) == [1, 1, 1]


@pytest.mark.parametrize(
    "nonsense",
    [None, True, np.bool_(True), "1", math.nan, math.inf, -math.inf, 1e39, 10**400, [1.0], np.array([1.0, 2.0])],
)
def test_a_value_that_is_not_finite_is_a_failure(nonsense: Any) -> None:
    with pytest.raises(
        RewardError, match=r"\(.*test_score\.py:\d+\) returned .*; a reward must be a (finite )?number"
    ) as caught:
        stop(lambda: nonsense)
    assert "sample 10 data_source: demo" in str(caught.value)
    scores = score(lambda: nonsense, samples(), args={}, on_error=-1)
    assert (scores.rewards.tolist(), scores.failures) == ([-1, -1, -1], 3)


def picky(response: str) -> float:
    return float(json.loads('{"0": 0.5, "2": 1.0}')[response])


def broken(response: str) -> float:
    return json.loads(response + "}")


def test_a_failure_names_sample_function_line_and_error() -> None:
    with pytest.raises(RewardError) as caught:
        stop(picky)
    line = picky.__code__.co_firstlineno + 1
    assert str(caught.value).splitlines() == [
        f"reward {__name__}:picky raised KeyError: '1' ({__file__}:{line})",
        "  sample 11 data_source: demo",
        "  prompt: 'prompt 1'",
        "  response: '1'",
    ]
    assert isinstance(caught.value.__cause__, KeyError)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_the_line_is_the_users_not_the_librarys() -> None:
    with pytest.raises(RewardError, match=rf"JSONDecodeError: .*{__file__}:{broken.__code__.co_firstlineno + 1}\)"):
        stop(broken)


def test_failures_count_as_the_stated_reward() -> None:
    scores = score(picky, samples(), args={}, on_error=-0.5)
    assert scores.rewards.tolist() == [0.5, -0.5, 1.0]
    assert scores.failures == 1


def test_a_batched_function_that_raises_names_its_samples() -> None:
    @dagrl.reward(batched=True)
    def failing(response: list[str]) -> list[float]:
        raise RuntimeError("judge is down")

    with pytest.raises(RewardError, match=r"RuntimeError: judge is down[\s\S]*samples 10\.\.12, the first one's"):
        stop(failing)
    scores = score(failing, samples(), args={}, on_error=0.0)
    assert (scores.rewards.tolist(), scores.failures) == ([0, 0, 0], 3)


@pytest.mark.parametrize(
    ("results", "message"),
    [
        ([1.0], "returned 1 reward for 3 samples"),
        ([1.0] * 4, "returned 4 rewards for 3 samples"),
        (None, "returned None; a batched reward returns a number for each sample"),
        (1.0, r"returned 1\.0; a batched"),
        ("123", "returned '123'; a batched"),
        ([0.0, None, 1.0], r"returned None; a reward must be a number[\s\S]*sample 11 "),
        (np.array([0.0, 1.0, np.nan]), r"returned nan; a reward must be a finite number[\s\S]*sample 12 "),
    ],
)
def test_batched_results_are_checked(results: Any, message: str) -> None:
    function = dagrl.reward(batched=True)(lambda response: results)
    with pytest.raises(RewardError, match=message):
        stop(function)


def test_one_bad_number_of_a_batch_is_one_failure() -> None:
    function = dagrl.reward(batched=True)(lambda response: [0.25, math.nan, 1.0])
    scores = score(function, samples(), args={}, on_error=0.0)
    assert (scores.rewards.tolist(), scores.failures) == ([0.25, 0, 1], 1)


def test_long_texts_are_shortened_in_errors() -> None:
    long = Samples([0], ["p" * 10_000], ["r" * 10_000], ["1"], ["demo"], [{}])
    with pytest.raises(RewardError) as caught:
        score(picky, long, args={}, on_error="stop")
    shown = str(caught.value).partition("\n")[2]
    assert len(shown) < 600
    assert "rrr ... rrr" in shown


def test_a_function_that_exits_has_failed_and_does_not_take_the_worker_along() -> None:
    def leaving(response: str) -> float:
        raise SystemExit("usage: judge FILE")

    with pytest.raises(RewardError, match=rf"raised SystemExit: usage: judge FILE \({__file__}:\d+\)\n  sample 10 "):
        stop(leaving)
    assert score(leaving, samples(), args={}, on_error=-1.0).failures == 3
    batched = dagrl.reward(batched=True)(leaving)
    assert score(batched, samples(), args={}, on_error=-1.0).rewards.tolist() == [-1, -1, -1]


@pytest.mark.parametrize("marks", [{}, {"batched": True}, {"concurrency": 2}])
def test_an_interrupt_is_never_counted_and_names_its_sample(marks: dict) -> None:
    def interrupted(response: str) -> float:
        raise KeyboardInterrupt

    with pytest.raises(RewardError, match=r"interrupted raised KeyboardInterrupt \(.*:\d+\)\n  samples? 10"):
        score(dagrl.reward(**marks)(interrupted), samples(), args={}, on_error=0.0)


class Leave(BaseException):
    """Not an Exception."""


@pytest.mark.parametrize("error", [Leave("x"), GeneratorExit("x"), asyncio.CancelledError("x"), SystemExit("x")])
@pytest.mark.parametrize("marks", [{}, {"batched": True}, {"concurrency": 2}])
def test_whatever_a_function_raises_is_a_failure_of_its_sample(error: BaseException, marks: dict) -> None:
    def failing(response: str) -> float:
        raise error

    marked = dagrl.reward(**marks)(failing)
    with pytest.raises(RewardError, match=rf"failing raised {type(error).__name__}: x \(.*:\d+\)\n  samples? 10"):
        score(marked, samples(), args={}, on_error="stop")
    assert score(marked, samples(), args={}, on_error=0.0).failures == 3


class Agrees(float):
    """Whatever it is compared with."""

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = lambda self, other: True  # type: ignore[assignment]
    __abs__ = lambda self: 0.0  # noqa: E731
    __hash__ = float.__hash__


class AgreesToo(int):
    """Whatever it is compared with, and nothing as a float."""

    __le__ = lambda self, other: True  # noqa: E731
    __abs__ = lambda self: 0  # noqa: E731
    __float__ = lambda self: math.nan  # noqa: E731


def raising(*_: object) -> Any:
    raise Leave("of the result's class")


class Unreadable(float):
    __float__ = raising


class UnreadableToo:
    __repr__ = __getattr__ = raising


class UnreadableDict(dict):
    __contains__ = __getitem__ = raising


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda: Agrees("nan"), "finite number"),
        (lambda: Agrees("inf"), "finite number"),
        (lambda: AgreesToo(1), "finite number"),
        (lambda: {"score": Agrees("nan")}, "finite number"),
        (lambda: Unreadable(1), "a Unreadable that cannot be read"),
        (lambda: UnreadableToo(), "a UnreadableToo that cannot be read"),
        (lambda: UnreadableDict(score=1.0), "a UnreadableDict that cannot be read"),
    ],
)
@pytest.mark.parametrize("batched", [False, True])
def test_results_that_say_they_are_fine_are_read_as_numbers(make: Callable, what: str, batched: bool) -> None:
    result = make()
    function = dagrl.reward(batched=True)(lambda response: [result] * 3) if batched else lambda response: result
    with pytest.raises(RewardError, match=rf"returned .*{what}[\s\S]*sample 10"):
        stop(function)
    scores = score(function, samples(), args={}, on_error=0.5)
    assert (scores.rewards.tolist(), scores.failures) == ([0.5] * 3, 3)


def test_further_numbers_that_say_they_are_fine_are_read_as_numbers() -> None:
    def rewards(response: str) -> dict:
        return {"score": 1.0, "a": Agrees("nan"), "b": Agrees(2), "c": 10**400, "d": AgreesToo(1)}

    assert score(rewards, samples(1), args={}, on_error="stop").further == [{"b": 2.0}]
    (number,) = score(rewards, samples(1), args={}, on_error="stop").further[0].values()
    assert type(number) is float


class Endless(list):
    def __iter__(self) -> Iterator[float]:
        return itertools.repeat(1.0)


class Shorter(list):
    def __iter__(self) -> Iterator[float]:
        return iter([1.0])


class WithoutLength(list):
    __len__ = raising


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda: Shorter([1.0] * 3), "returned 1 reward for 3 samples"),
        (lambda: WithoutLength([1.0] * 3), "returned a WithoutLength that cannot be read"),
        (lambda: UnreadableToo(), "returned a UnreadableToo that cannot be read"),
    ],
)
def test_inconsistent_lists_of_rewards_are_failures(make: Callable, what: str) -> None:
    results = make()
    with pytest.raises(RewardError, match=what):
        stop(dagrl.reward(batched=True)(lambda response: results))
    assert stop(dagrl.reward(batched=True)(lambda response: Endless([0.0] * 3))) == [1, 1, 1]


def by_position(response: str, /) -> float:
    return 0.0


@pytest.mark.parametrize(
    ("function", "args", "message"),
    [
        (lambda respons: 0.0, {}, "wants 'respons', which is none of prompt, response, answer"),
        (lambda response: 0.0, {"scale": 1}, "has no parameter 'scale'"),
        (lambda response: 0.0, {"answer": "7"}, "may not set 'answer'"),
        (by_position, {}, "takes 'response' by position"),
    ],
)
def test_functions_and_args_that_do_not_fit_are_refused(function: Callable, args: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fields_of(function, args)


def test_objects_that_are_called_are_rewards_too() -> None:
    class Constant:
        def __call__(self, response: str) -> float:
            return {"0": 0.5}[response]

    assert score(Constant(), samples(1), args={}, on_error="stop").rewards.tolist() == [0.5]
    with pytest.raises(RewardError, match="KeyError: '1'"):
        score(Constant(), samples(2), args={}, on_error="stop")
