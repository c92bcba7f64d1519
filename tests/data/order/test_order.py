"""Orders of the rows of sources, epoch after epoch, and their states."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pytest

from dagrl.data.order.mixed import MixedSources, Stage, Stages
from dagrl.data.order.order import PromptOrder
from dagrl.data.order.passes import Adaptive, AdaptiveRules, Passes, in_order, shuffled
from dagrl.data.order.sampler import Outcome, SourceRows, prompt_id


def shuffled_order(sizes: list[int], staleness: int) -> PromptOrder:
    sources = [SourceRows(f"s{number}", size) for number, size in enumerate(sizes)]
    orders = [Passes(size, shuffled([size], (5, number))) for number, size in enumerate(sizes)]
    return PromptOrder(MixedSources(sources, orders, Stages([Stage((1.0,) * len(sizes))])), sources, staleness)


@pytest.mark.parametrize("groups", [[1], [7], [3, 1, 5], [8192] * 20 + [17], [300_000, 200_000, 100_000], [0, 4, 0]])
def test_an_epoch_in_windows_is_a_permutation_that_uses_few_groups_at_a_time(groups: list[int]) -> None:
    rows = sum(groups)
    order = Passes(rows, shuffled(groups, (3,), whole=0))
    first, second = (order.take(rows, (), 1) for _ in range(2))
    assert sorted(first) == sorted(second) == list(range(rows))
    assert rows == 1 or first != second
    group_of = np.searchsorted(np.cumsum(groups), first, side="right")
    assert len(set(group_of[:4096].tolist())) <= max(9, len(groups) if rows < 2**16 else 0)
    again = Passes(rows, shuffled(groups, (3,), whole=0))
    again.load({"passed": rows + rows // 3, "rows": rows})
    assert again.take(1, (), 1) == second[rows // 3 : rows // 3 + 1]


def test_a_small_source_has_the_permutations_of_its_seed() -> None:
    order = Passes(10, shuffled([4, 6], (3,)))
    assert order.take(10, (), 1) == np.random.default_rng([3, 0]).permutation(10).tolist()


def test_a_source_with_other_rows_keeps_the_epoch() -> None:
    order = Passes(10, in_order(10))
    order.load({"passed": 25, "rows": 20})
    assert order.passed == 15
    order.load({"passed": 39, "rows": 20})
    assert order.take(1, (), 1) == [0]


def test_an_order_continues_with_other_sources_and_limits() -> None:
    def order(*sources: tuple[str, int], kind: str = "by sources", limits: str = "9") -> PromptOrder:
        rows = [SourceRows(*each) for each in sources]
        stages = Stages([Stage((1.0,) * len(rows))])
        mixed = MixedSources(rows, [Passes(size, in_order(size)) for _, size in sources], stages)
        return PromptOrder(mixed, rows, 0, kind=kind, limits=limits)

    first = order(("a", 4), ("b", 4))
    ids = first.replace(1, first.take(1, 4), [0])
    assert sorted(ids) == [1, 2, prompt_id(1, 0), prompt_id(1, 1)]
    state = json.loads(json.dumps(first.after(1)))

    turned = order(("new", 3), ("b", 4), ("a", 4))
    assert turned.load(state) == ""
    assert turned.ids_of([2, prompt_id(1, 1), prompt_id(7, 0)][:2], state) == [prompt_id(2, 2), prompt_id(1, 1)]
    assert sorted(turned.take(2, 6)) == sorted(
        [prompt_id(0, 0), prompt_id(0, 1), prompt_id(1, 2), prompt_id(1, 3), prompt_id(2, 3), prompt_id(2, 1)]
    ), "row 0 of a is too long"
    gone = order(("b", 4))
    gone.load(state)
    assert gone.ids_of([2, prompt_id(1, 1)], state) == [None, 1]
    assert gone.take(2, 2) == [2, 3]

    wider = order(("a", 4), ("b", 4), limits="99")
    wider.load(state)
    assert 0 in wider.take(2, 4), "it may fit now"
    other = order(("a", 4), kind="adaptive")
    assert other.load(state) == "data.order was by sources before, and is adaptive now: the new order begins anew"
    assert other.take(2, 2) == [0, 1]
    with pytest.raises(ValueError, match="the checkpoint is of a version of dagrl that kept no order of prompts"):
        order(("a", 4)).load({"position": 3, "passed": 3})


def test_a_source_without_a_usable_prompt_ends_the_run() -> None:
    order = shuffled_order([2, 5], 0)
    ids = order.take(1, 4)
    with pytest.raises(ValueError, match=r"none of the 2 prompts of `s0` fits data\.max_prompt_tokens; raise that"):
        order.replace(1, ids, [0, 1])


def test_adaptive_prefers_the_band_and_leaves_out_what_is_solved() -> None:
    order = Adaptive(40, in_order(40), AdaptiveRules(0.2, 0.8, 5, "advantage", 0.05), (1,))
    assert sorted(order.take(40, (), 1)) == list(range(40)), "each new prompt once"
    rates = {row: (0.0, 0.5, 1.0, 0.1)[row % 4] for row in range(40)}
    order.observe(1, {row: Outcome(row, rate, rate, 0.4 if rate == 0.1 else 0.0) for row, rate in rates.items()})
    counts: Counter[float] = Counter()
    for _ in range(400):
        taken = order.take(8, (), 3)
        assert len(set(taken)) == 8
        counts.update(rates[row] for row in taken)
        order.observe(
            1, {row: Outcome(row, rates[row], rates[row], 0.4 if rates[row] == 0.1 else 0.0) for row in taken}
        )
    assert counts[1.0] == 0
    assert counts[0.5] > counts[0.1] > counts[0.0] > 0
    assert {rates[row] for row in order.take(40, (), 3)} == {0.0, 0.5, 0.1, 1.0}, "a take of all rows has all of them"
    assert any(rates[row] == 1.0 for _ in range(60) for row in order.take(8, (), 7)), "they come back"
    assert not {0, 4, 8} & {row for _ in range(50) for row in order.take(8, {0, 4, 8}, 7)}


RULES = AdaptiveRules(0.2, 0.8, 5, "advantage", 0.05)


@pytest.mark.parametrize(("rows", "seed"), [(20, 2), (30, 1), (12, 1)])
def test_adaptive_continues_with_another_seed_or_number_of_rows(rows: int, seed: int) -> None:
    def order(rows: int, seed: int) -> Adaptive:
        return Adaptive(rows, shuffled([rows], (seed,)), RULES, (seed, 0))

    before = order(20, 1)
    taken = before.take(8, (), 1)
    before.observe(1, {row: Outcome(row, 0.5, row / 20, 0.0) for row in taken})
    after = order(rows, seed)
    after.load(before.state())
    drawn = {row for step in range(2, 40) for row in after.take(4, (), step)}
    assert drawn == set(range(rows)), "each row comes, also those that are new"
    known = after.state()["table"]
    assert len(known["row"]) == len(set(known["row"].tolist())), "a row is in the table once"
    rates = dict(zip(known["row"].astype(int).tolist(), known["rate"].tolist(), strict=True))
    assert all(rates[row] == row / 20 for row in taken if row < rows)


def test_adaptive_says_that_no_row_is_usable() -> None:
    order = Adaptive(2, in_order(2), RULES, (1,))
    order.take(2, (), 1)
    with pytest.raises(ValueError, match="no prompt of a source fits max_prompt_tokens"):
        order.take(1, {0, 1}, 2)


def test_the_steps_that_a_checkpoint_has_observed_are_not_negative() -> None:
    order = shuffled_order([4], 2)
    order.take(1, 2)
    assert order.after(1)["observed"] == 0


def test_no_more_groups_are_in_use_than_stay_in_memory() -> None:
    groups = [7, 5, 0, 6, 9, 3]
    window = shuffled(groups, (3,), kept=2)
    of_row = np.repeat(np.arange(6), groups)
    place, rows = 0, list[int]()
    while place < 30:
        piece, first = window(0, place)
        assert first == place
        assert len({*of_row[piece].tolist()}) <= 2
        place += len(piece)
        rows += piece.tolist()
    assert sorted(rows) == list(range(30))
    assert len(shuffled(groups, (3,), kept=6)(0, 0)[0]) == 30
