"""The groups of a step, its number of rounds, and the error when groups are missing."""

from __future__ import annotations

from random import Random
from statistics import fmean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dagrl.config.schema import Pipeline
from dagrl.orchestrator.steps.dynamic_sampling import Selection
from dagrl.workers.errors import RunError


@pytest.fixture(scope="module")
def selection(lab):
    def make(needed: int = 8, **node) -> Selection:
        declared = lab.tiny_pipeline()
        declared["data"]["prompts_per_step"] = needed
        declared["nodes"]["keep"] = {"op": "filter", **node}
        return Selection(Pipeline.model_validate(declared), "keep", 5)

    return make


def test_the_first_that_pass_make_the_step_and_the_others_are_surplus(selection):
    chosen = selection(3)
    chosen.add([0, 1, 2], [1])
    assert chosen.is_short()
    chosen.add([3, 4, 5, 6], [3, 4, 6])
    assert not chosen.is_short()
    assert chosen.batch() == [1, 3, 4]
    assert chosen.metrics() == {"filter/rounds": 2, "filter/kept_fraction": 4 / 7}
    assert chosen.filtered() == [0, 2, 5]


def test_a_step_that_is_not_full_after_its_last_round_ends_the_run(selection):
    chosen = selection(8, max_rounds=2)
    chosen.add([*range(8)], [1])
    assert chosen.is_short()
    chosen.add([*range(8, 16)], [9, 10])
    with pytest.raises(RunError) as caught:
        chosen.is_short()
    assert caught.value.cause == "3 of 16 prompts have passed in 2 rounds, and the step needs 8"
    assert caught.value.node == "keep (step 5)"
    assert "when_short: fill" in caught.value.hint


def test_or_is_filled_up_with_the_first_that_did_not_pass(selection):
    chosen = selection(5, max_rounds=2, when_short="fill", prompts_per_round=4)
    chosen.add([0, 1, 2, 3], [2])
    assert chosen.is_short()
    chosen.add([4, 5, 6, 7], [7])
    assert not chosen.is_short()
    assert chosen.batch() == [0, 1, 2, 3, 7]
    assert chosen.metrics() == {
        "filter/rounds": 2,
        "filter/kept_fraction": 2 / 8,
        "filter/filled_prompts": 3,
    }
    assert chosen.filtered() == [4, 5, 6]


def test_a_step_that_is_full_is_not_filled_up(selection):
    chosen = selection(2, when_short="fill")
    chosen.add([0, 1, 2, 3], [1, 2, 3])
    assert not chosen.is_short()
    assert chosen.batch() == [1, 2]
    assert chosen.metrics()["filter/filled_prompts"] == 0
    assert chosen.filtered() == [0]


@pytest.mark.parametrize(
    ("passed", "prompts"),
    [
        # (1 + 1) / (8 + 2) pass: 7 / 0.2 = 35, and 2 sqrt(7 * 0.8) / 0.2 = 23.7; more than a round has.
        (1, 8),
        # 6 / 10: 3 / 0.6 = 5, and 2 sqrt(3 * 0.4) / 0.6 = 3.65.
        (5, 8),
        # 8 / 10: 1 / 0.8 = 1.25, and 2 sqrt(0.2) / 0.8 = 1.12.
        (7, 3),
    ],
)
def test_a_further_round_is_as_large_as_it_has_to_be(selection, passed, prompts):
    chosen = selection(8)
    chosen.add([*range(8)], [*range(passed)])
    assert chosen.next_round() == prompts


def test_a_further_round_is_rarely_short_and_rarely_much_too_large(selection):
    rounds, sampled, chance = [], [], Random(7)
    for _ in range(300):
        chosen, begun = selection(64, max_rounds=100), 0
        while True:
            size = chosen.next_round() if begun else 64
            groups = range(begun, begun + size)
            chosen.add([*groups], [group for group in groups if chance.random() < 0.5])
            begun += size
            if not chosen.is_short():
                break
        rounds.append(chosen.metrics()["filter/rounds"])
        sampled.append(begun)
    # 128 are needed on average. Half of all steps are full after two rounds of 64, and rounds of 64 would begin 160.
    assert 128 < fmean(sampled) < 140
    assert 2.4 < fmean(rounds) < 2.6


@settings(deadline=None)
@given(st.data(), st.integers(1, 20), st.integers(1, 30), st.sampled_from(["stop", "fill"]))
def test_a_step_has_as_many_groups_as_it_needs_each_once_and_fills_up_only_where_it_must(
    selection, data, needed, per_round, when_short
):
    most = -(-needed // per_round) + 2
    chosen = selection(needed, prompts_per_round=per_round, max_rounds=most, when_short=when_short)
    begun, passed = 0, []
    for number in range(most):
        size = chosen.next_round() if number else per_round
        assert 1 <= size <= per_round
        here = data.draw(st.sets(st.integers(begun, begun + size - 1)))
        chosen.add([*range(begun, begun + size)], here)
        passed, begun = passed + sorted(here), begun + size
        try:
            if not chosen.is_short():
                break
        except RunError:
            assert (number, when_short) == (most - 1, "stop") and len(passed) < needed
            return
    batch = chosen.batch()
    assert batch == sorted(set(batch)) and set(batch) <= set(range(begun))
    if len(passed) >= needed:
        assert batch == passed[:needed]
    else:
        assert when_short == "fill" and set(passed) < set(batch)
        assert len(batch) == needed
