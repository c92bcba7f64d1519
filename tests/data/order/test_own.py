"""The user's sampler: what it does wrong is one sentence with its name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dagrl.data.order.own import OwnSampler
from dagrl.data.order.sampler import Outcome, SourceRows, prompt_id
from dagrl.plugins.sampler import check_sampler

SOURCES = [SourceRows("easy", 5), SourceRows("hard", 3)]


class Plain:
    """Takes rows of the first source; `answer` and `kept` replace what its methods return."""

    def __init__(self, sources: dict[str, int], seed: int, answer: Any = None, kept: Any = None) -> None:
        self.sources, self.seed, self.answer, self.kept = sources, seed, answer, kept
        self.told: list[dict[str, Any]] = []

    def take(self, count: int, step: int) -> Any:
        if isinstance(self.answer, Exception):
            raise self.answer
        return list(range(count)) if self.answer is None else self.answer

    def observe(self, rows: list[dict[str, Any]]) -> None:
        self.told += rows

    def state(self) -> Any:
        return self.kept

    def load(self, state: Any) -> None:
        self.kept = state


def sampler(**args: Any) -> OwnSampler:
    return OwnSampler(Plain, "mine:Plain", args, SOURCES, 7)


def test_it_gets_the_rows_of_the_sources_and_may_name_prompts_in_several_ways() -> None:
    mine = sampler(answer=[("hard", np.int64(2)), np.int64(4), prompt_id(1, 0), ("easy", 0)])
    assert (mine._sampler.sources, mine._sampler.seed) == ({"easy": 5, "hard": 3}, 7)
    assert mine.take(4, 1, [(), ()]) == [prompt_id(1, 2), 4, prompt_id(1, 0), 0]
    assert mine.passed() == [2, 2]


def test_it_is_told_outcomes_as_plain_rows() -> None:
    mine = sampler()
    mine.observe(3, [Outcome(prompt_id(1, 2), 0.5, 0.25, None, 9)], {})
    told = {"prompt": prompt_id(1, 2), "source": "hard", "row": 2, "step": 3, "reward": 0.5, "pass_rate": 0.25}
    assert mine._sampler.told == [told | {"advantage": None, "tokens": 9}]


def test_its_state_comes_back_as_it_was() -> None:
    mine, other = sampler(kept={"a": [1, 2.5, None, "x"], "b": {}}), sampler()
    mine.take(2, 1, [(), ()])
    other.load(mine.state(), ["easy", "hard"])
    assert (other._sampler.kept, other.passed()) == ({"a": [1, 2.5, None, "x"], "b": {}}, [2, 0])


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (KeyError("lost"), r"mine:Plain\.take raised KeyError: 'lost' \(.*test_own\.py:\d+\)"),
        ([0, 1, 0], r"take returns row 0 of easy twice for step 4; return different prompts"),
        ([0, 1], r"take returns 2 prompts, and must return 3"),
        ([0, 1, 2, 3], r"take returns 4 prompts, and must return 3"),
        ([0, 1, 5], r"take returns 5, which is no prompt; return \(source, row\).* easy with 5 rows, hard with 3 rows"),
        ([0, 1, -1], "take returns -1, which is no prompt"),
        ([0, 1, ("hard", 3)], r"take returns \('hard', 3\), which is no prompt"),
        ([0, 1, ("other", 0)], r"take returns \('other', 0\), which is no prompt"),
        ([0, 1, prompt_id(2, 0)], "which is no prompt"),
        ([0, 1, True], "take returns True, which is no prompt"),
        ([0, 1, 2.0], r"take returns 2\.0, which is no prompt"),
        ([0, 1, "2"], "take returns '2', which is no prompt"),
        ([0, 1, None], "take returns None, which is no prompt"),
        (iter([0, 1, 2]), "take returns list_iterator; return a list of 3 prompts"),
        ("012", "take returns str; return a list of 3 prompts"),
    ],
)
def test_wrong_prompts_are_refused(answer: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        sampler(answer=answer).take(3, 4, [(), ()])


@pytest.mark.parametrize(
    ("kept", "words"),
    [
        ({"a": np.float32(1)}, r"state returns what JSON cannot hold .*float32"),
        ({1, 2}, "state returns what JSON cannot hold"),
        ({"a": [{3: "x"}]}, "state returns a dict with the key 3, which JSON makes text"),
        (object(), "state returns what JSON cannot hold"),
    ],
)
def test_a_state_that_is_not_plain_data_is_refused(kept: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        sampler(kept=kept).state()


def test_prompts_that_are_too_long_are_asked_for_again_and_not_for_ever() -> None:
    class Counts(Plain):
        def take(self, count: int, step: int) -> list[int]:
            self.next = getattr(self, "next", 0) + count
            return [each % 5 for each in range(self.next - count, self.next)]

    mine = OwnSampler(Counts, "mine:Counts", {}, SOURCES, 7)
    assert mine.take(3, 1, [{1, 2}, ()]) == [0, 3, 4]
    with pytest.raises(ValueError, match="100 times, prompts that are too long"):
        sampler(answer=[1]).take(1, 1, [{1}, ()])


class WithoutState:
    def __init__(self, sources: Any, seed: int) -> None: ...

    def take(self, count: int, step: int) -> list[int]: ...


class OtherTake(Plain):
    def take(self, count: int) -> list[int]: ...  # type: ignore[override]


@pytest.mark.parametrize(
    ("made", "args", "words"),
    [
        (len, {}, "`mine` is no class; a sampler is one with take"),
        (WithoutState, {}, "`mine` has no method state; a sampler has take"),
        (OtherTake, {}, r"`mine\.take` cannot be called: too many positional arguments; a sampler has take"),
        (Plain, {"unknown": 1}, "`mine` cannot be called: got an unexpected keyword argument 'unknown'; a sampler is"),
    ],
)
def test_a_class_that_is_no_sampler_is_refused(made: Any, args: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        check_sampler(made, "mine", args)
