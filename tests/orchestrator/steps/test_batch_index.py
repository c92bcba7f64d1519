"""The index: which block holds which rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from dagrl.config.schema import Scope
from dagrl.data.redistribute import shard_bounds
from dagrl.ops.work import ColumnSource
from dagrl.orchestrator.steps.batch_index import Arrival, BatchIndex
from dagrl.scheduler.plan import HOST, PlannedTask, Rows
from dagrl.workers.messages import Block


def block(rows, ref="ref", tokens=None, shards=()):
    return Block(np.asarray(rows), ref, None if tokens is None else np.asarray(tokens), 0.0, 1.0, shards)


def index_of_two_shards() -> BatchIndex:
    index = BatchIndex(group_size=2, shards=2)
    index.add_source("prompts", block([2, 3], "p1", [5, 5], shards=(1,)))
    index.add_source("prompts", block([0, 1], "p0", [3, 3], shards=(0,)))
    return index


def test_rows_come_by_shard_whatever_the_order_of_arrival():
    index = index_of_two_shards()
    assert index.rows((0, 1)).tolist() == [0, 1, 2, 3]
    assert index.groups(index.rows((0, 1))).tolist() == [0, 0, 1, 1]


def test_tokens_of_a_row_add_up_over_blocks():
    index = index_of_two_shards()
    index.add("rollout", block([3, 0], tokens=[7, 1]))
    assert index.tokens(np.array([0, 1, 2, 3])).tolist() == [4, 3, 5, 12]
    assert index.total_tokens == 24


def test_promised_objects_are_found_like_others():
    update = PlannedTask(
        "update", "update", "update", "actor", Scope.BATCH, Rows.TRAIN, inputs={"ref_logprob": ("ref", "ref_logprob")}
    )
    promising, told = index_of_two_shards(), index_of_two_shards()
    promising.promise("ref", np.array([0, 3]), "r0")
    promising.promise("ref", np.array([2, 1]), "r1")
    # A rank without rows promises nothing.
    promising.promise("ref", np.zeros(0, dtype=np.int64), "r2")
    told.add("ref", block([0, 3], "r0"))
    told.add("ref", block([2, 1], "r1"))
    for rows in (np.arange(4), np.array([3]), np.array([1, 2])):
        assert promising.sources(update, rows) == told.sources(update, rows)
    assert promising.total_tokens == told.total_tokens == 16
    assert promising.sources(update, np.array([3]))[0].refs == ("r0",)


def test_a_shard_is_complete_when_all_its_groups_are_there():
    index = BatchIndex(group_size=2, shards=2)
    index.add_source("prompts", block(range(4), "p0", shards=(0,)))
    index.add_source("prompts", block(range(4, 6), "p1", shards=(1,)))
    index.expect("rollout")
    assert index.arrived("rollout", np.array([2, 3])) == Arrival(shards=(0,), complete=(), surplus=())
    assert not index.complete("rollout")
    assert index.arrived("rollout", np.array([4, 5, 0, 1])) == Arrival(shards=(1, 0), complete=(1, 0), surplus=())
    assert index.complete("rollout")
    assert index.rows((0,)).tolist() == [0, 1, 2, 3]


sizes_of_groups = st.lists(st.integers(1, 3), min_size=1, max_size=12)
"""Rows of each group of a batch."""


def rows_of(sizes: Sequence[int], groups: Iterable[int]) -> list[int]:
    return [group * max(sizes) + row for group in groups for row in range(sizes[group])]


def over_sampled(sizes: Sequence[int], shards: int) -> BatchIndex:
    index = BatchIndex(max(sizes), shards)
    for shard, (begin, end) in enumerate(shard_bounds(len(sizes), shards)):
        rows = np.array(rows_of(sizes, range(begin, end)), dtype=np.int64)
        index.add_source("prompts", block(rows, f"p{shard}", rows % 7, shards=(shard,)))
    return index


@given(sizes=sizes_of_groups, shards=st.integers(1, 5), data=st.data())
def test_groups_have_as_many_rows_as_their_source_gives_them(sizes, shards, data) -> None:
    index = over_sampled(sizes, shards)
    groups = data.draw(st.permutations(range(len(sizes))))
    rows = index.rows_of(groups)
    assert rows.tolist() == rows_of(sizes, groups)
    assert index.groups(rows).tolist() == [group for group in groups for _ in range(sizes[group])]
    # As a replay sees it.
    shown = {shard: index.rows((shard,)) for shard in range(shards)}
    again = BatchIndex.recorded(index.group_size, shards, shown, index.tokens(np.arange(max(rows.max() + 1, 1))))
    assert again.rows_of(groups).tolist() == rows.tolist()
    assert again.total_tokens == index.total_tokens


@given(
    sizes=sizes_of_groups,
    needed=st.integers(1, 12),
    shards=st.integers(1, 5),
    data=st.data(),
)
def test_shards_are_filled_with_the_groups_that_come_first(sizes, needed, shards, data) -> None:
    groups = len(sizes)
    needed = min(needed, groups)
    index = over_sampled(sizes, shards)
    index.expect("rollout", choose=needed)
    order = data.draw(st.permutations(range(groups)))
    cuts = sorted(data.draw(st.lists(st.integers(0, groups), max_size=4)))
    complete, surplus = [], []
    for begin, end in zip([0, *cuts], [*cuts, groups], strict=True):
        arrival = index.arrived("rollout", index.rows_of(order[begin:end]))
        assert set(arrival.complete) <= set(arrival.shards)
        complete += arrival.complete
        surplus += arrival.surplus
        assert index.complete("rollout") == (end >= needed)
    assert surplus == list(order[needed:])
    bounds = shard_bounds(needed, shards)
    assert complete == [shard for shard, (begin, end) in enumerate(bounds) if begin < end]
    for shard, (begin, end) in enumerate(bounds):
        mine = order[begin:end]
        assert index.rows((shard,)).tolist() == sorted(index.rows_of(mine).tolist()), "whole groups, each row once"
    chosen = index.rows(tuple(range(shards)))
    assert chosen.tolist() == sorted(index.rows_of(order[:needed]).tolist())
    # What was left out costs nothing from here on.
    assert index.total_tokens == sum(row % 7 for row in chosen.tolist())


def test_a_group_has_the_id_of_its_prompt():
    index = BatchIndex(group_size=2, shards=2)
    for shard, (rows, places) in enumerate((([0, 1, 2, 3], [17, 4]), ([4, 5], [18]))):
        index.add_source("prompts", replace(block(rows, "p", shards=(shard,)), prompts=np.array(places)))
    assert [index.prompt(group) for group in range(3)] == [17, 4, 18]


def test_sources_name_each_producers_blocks_once_with_the_columns_wanted_of_it():
    index = index_of_two_shards()
    index.add("rollout", block([3, 1, 0], "r0"))
    index.add("rollout", block([2], "r1"))
    inputs = {
        "prompt_tokens": ("prompts", "prompt_tokens"),
        "answer": ("prompts", "answer"),
        "tokens": ("rollout", "response_tokens"),
    }
    task = PlannedTask("reward", "reward", "reward", HOST, Scope.ROW, Rows.TRAIN, inputs=inputs)
    prompts, rollout = index.sources(task, np.array([2, 3]))
    assert prompts == ColumnSource(("p1",), {"prompt_tokens": "prompt_tokens", "answer": "answer"})
    assert rollout == ColumnSource(("r0", "r1"), {"tokens": "response_tokens"})


def test_an_object_that_several_blocks_share_is_named_once():
    index = BatchIndex(2, 2)
    index.add_source("prompts", block([0, 1], "both", shards=(0,)))
    index.add_source("prompts", block([2, 3], "both", shards=(1,)))
    (source,) = index.sources(reads_prompts(), np.array([3, 0]))
    assert source.refs == ("both",)


def test_a_rank_without_rows_still_gets_the_columns():
    index = index_of_two_shards()
    (source,) = index.sources(reads_prompts(), np.zeros(0, dtype=np.int64))
    assert source.refs == ("p1",)


@given(
    sizes=sizes_of_groups,
    shards=st.integers(1, 5),
    data=st.data(),
)
def test_each_group_completes_the_shard_that_the_source_has_put_it_into(sizes, shards, data) -> None:
    groups, index = len(sizes), over_sampled(sizes, shards)
    index.expect("rollout")
    bounds = shard_bounds(groups, shards)
    left = {shard: set(range(begin, end)) for shard, (begin, end) in enumerate(bounds)}
    order = data.draw(st.permutations(range(groups)))
    cuts = sorted(data.draw(st.lists(st.integers(0, groups), max_size=4)))
    for begin, end in zip([0, *cuts], [*cuts, groups], strict=True):
        here = order[begin:end]
        arrival = index.arrived("rollout", index.rows_of(here))
        touched = {shard for shard, mine in left.items() if mine & set(here)}
        left = {shard: mine - set(here) for shard, mine in left.items()}
        assert (set(arrival.shards), arrival.surplus) == (touched, ())
        assert set(arrival.complete) == {shard for shard in touched if not left[shard]}
        assert index.complete("rollout") == (not any(left.values()))
    for shard, (begin, end) in enumerate(bounds):
        assert index.rows((shard,)).tolist() == rows_of(sizes, range(begin, end))
    assert index.total_tokens == sum(row % 7 for row in rows_of(sizes, range(groups)))


def test_a_further_rounds_rows_are_the_batch_until_it_is_chosen_of_all() -> None:
    index = BatchIndex(group_size=2, shards=2)
    for shard, rows in enumerate((range(4), range(4, 6))):
        index.add_source("prompts", block(rows, f"p{shard}", [1] * len(rows), shards=(shard,)))
    index.begin_round()
    assert (index.first_group, index.rows((0, 1)).tolist()) == (3, [])
    for shard, rows in enumerate((range(6, 8), range(8, 12))):
        index.add_source("prompts", block(rows, f"q{shard}", [2] * len(rows), shards=(shard,)))
    assert index.rows((0, 1)).tolist() == [*range(6, 12)]
    index.select([0, 2, 4])
    assert [index.rows((shard,)).tolist() for shard in (0, 1)] == [[0, 1], [4, 5, 8, 9]]
    assert index.total_tokens == 1 * 4 + 2 * 2, "what was left out costs nothing from here on"
    # What was written in any round is found.
    (source,) = index.sources(reads_prompts(), np.array([4, 5, 8, 9]))
    assert source.refs == ("p1", "q1")


@settings(deadline=None)
@given(groups=st.integers(1, 12), shards=st.integers(1, 5), over=st.integers(0, 4), data=st.data())
def test_a_task_behind_a_filter_brings_the_groups_that_were_chosen(groups, shards, over, data) -> None:
    index = over_sampled(data.draw(st.lists(st.integers(1, 3), min_size=groups + over, max_size=groups + over)), shards)
    index.expect("rollout", choose=groups if over else None)
    index.arrived("rollout", index.rows_of(data.draw(st.permutations(range(groups + over)))))
    there = index.groups_in(index.rows(tuple(range(shards))))
    chosen = sorted(data.draw(st.sets(st.sampled_from(there), min_size=1)))
    index.select(chosen)
    assert index.groups_in(index.rows(tuple(range(shards)))) == chosen
    index.expect("answers")
    complete = [index.arrived("answers", index.rows_of([group])) for group in data.draw(st.permutations(chosen))]
    assert index.complete("answers")
    told = [shard for arrival in complete for shard in arrival.complete]
    assert sorted(told) == [shard for shard in range(shards) if len(index.rows((shard,)))]
    assert not any(arrival.surplus for arrival in complete)


def reads_prompts() -> PlannedTask:
    inputs = {"prompt_tokens": ("prompts", "prompt_tokens")}
    return PlannedTask("ref", "ref", "logprob", "actor", Scope.ROW, Rows.TRAIN, inputs=inputs)


@given(sizes=sizes_of_groups, more=sizes_of_groups, shards=st.integers(1, 5), over=st.booleans())
def test_returned_groups_are_spread_over_the_shards(sizes, more, shards, over) -> None:
    over = over and len(sizes) > 1
    index = over_sampled(sizes, shards)
    stride, groups = max(sizes), len(sizes)
    if over:
        index.expect("rollout", choose=groups - 1)
        index.arrived("rollout", index.rows_of(range(1, groups)))
    before = [index.rows((shard,)).tolist() for shard in range(shards)]
    assert index.next_group == groups
    rows = [(groups + group) * stride + row for group, size in enumerate(more) for row in range(min(size, stride))]
    index.extend("buffer", block(index.rows(tuple(range(shards))), "kept"))
    index.extend("buffer", block(rows, "returned", np.full(len(rows), 3)))
    assert index.returned == set(range(groups, groups + len(more)))
    added = [sorted(set(index.rows((shard,)).tolist()) - set(before[shard])) for shard in range(shards)]
    assert [index.rows((shard,)).tolist() for shard in range(shards)] == [
        sorted(own + share) for own, share in zip(before, added, strict=True)
    ]
    assert [row for each in added for row in each] == rows
    shares = [len(index.groups_in(np.array(each, dtype=np.int64))) for each in added]
    assert max(shares) - min(shares) <= 1
    assert index.objects("buffer", np.array(rows)) == ["returned"]
    assert index.tokens(np.array(rows)).tolist() == [3] * len(rows)
