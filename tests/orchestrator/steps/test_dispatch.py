"""Who computes which rows, for any layout of the ranks and any lengths of the rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagrl.backends.megatron.section import ParallelSpec, coordinates
from dagrl.config.coordinates import Coordinates
from dagrl.config.schema import Pipeline, Scope
from dagrl.data.redistribute import shard_bounds
from dagrl.ops.work import PartialRollout, PartWork, RolloutWork, ScoreWork, SourceWork, TaskWork
from dagrl.orchestrator.steps.batch_index import BatchIndex
from dagrl.orchestrator.steps.dispatch import dispatch, dispatch_chunk
from dagrl.scheduler.commands import Run
from dagrl.scheduler.plan import HOST, Executor, PlannedTask, Rows
from dagrl.workers.messages import Block

INPUTS = {"prompt_tokens": ("prompts", "prompt_tokens"), "response_tokens": ("rollout", "response_tokens")}
REF = PlannedTask("ref", "ref", "logprob", "actor", Scope.ROW, Rows.TRAIN, "actor", INPUTS, {"logprob": "ref_logprob"})
ROLLOUT = replace(REF, name="rollout", node="rollout", op="rollout", generates=True, streams=True)
UPDATE = replace(REF, name="update", node="update", op="update", scope=Scope.BATCH, trains=True, outputs={})
REWARD = replace(REF, name="reward", node="reward", op="reward", executor=HOST, engine=None)
SAMPLES = replace(REWARD, name="samples", node="samples", op="samples", scope=Scope.BATCH)


class Step:
    """A batch of `groups` prompts in shards, its columns recorded by `producers` ranks with random rows.

    The groups have `sizes` in turn, by default all `group_size`.
    """

    def __init__(
        self,
        lab,
        groups: int,
        group_size: int,
        shards: int,
        lengths: Sequence[int],
        producers: int = 1,
        sizes: Sequence[int] = (),
    ):
        declared = lab.tiny_pipeline()
        declared["data"]["prompts_per_step"] = groups
        declared["nodes"]["update"].pop("mini_batch")
        declared["schedule"] = {"shards_per_step": shards}
        self.declared = declared
        self.group_size, self.shards = group_size, tuple(range(shards))
        self.rows_of_group = [
            [group * group_size + row for row in range(min(size, group_size))]
            for group, size in enumerate(np.resize(sizes or [group_size], groups).tolist())
        ]
        self.lengths = np.resize(np.array(lengths, dtype=np.int64), groups * group_size)
        self.store: dict[str, np.ndarray] = {}
        self.index = BatchIndex(group_size, shards)
        for shard, (begin, end) in enumerate(shard_bounds(groups, shards)):
            rows = np.array([*chain(*self.rows_of_group[begin:end])], dtype=np.int64)
            self.index.add_source("prompts", self._block(f"prompts {shard}", rows, (shard,)))
            for producer in range(producers):
                mine = rows[(self.lengths[rows] + rows) % producers == producer]
                self.index.add("rollout", self._block(f"rollout {shard} {producer}", mine, (shard,)))

    def _block(self, ref: str, rows: np.ndarray, shards: tuple[int, ...]) -> Block:
        self.store[ref] = rows
        return Block(rows, ref, self.lengths[rows], 0.0, 1.0, shards)

    def share(self, task: PlannedTask, executor: Executor, shards: tuple[int, ...] | None = None, **update: Any):
        """The work of each rank; `update` edits the update node."""
        declared = self.declared
        declared["nodes"]["update"].update(update)
        run = Run(5, task.name, self.shards if shards is None else shards)
        return dispatch(run, task, executor, self.index, Pipeline.model_validate(declared), committed=4)

    def fetched(self, part: PartWork) -> dict[str, list[int]]:
        """The part's rows of each column, from the blocks of its sources; no block is without rows."""
        found: dict[str, list[int]] = {column: [] for column in INPUTS}
        for source in part.sources:
            for ref in source.refs:
                mine = np.intersect1d(self.store[ref], part.rows)
                assert mine.size or not part.rows.size, "a block for nothing"
                for column in source.columns:
                    found[column] += mine.tolist()
        return {column: sorted(rows) for column, rows in found.items()}


def actor(tp: int, dp: int) -> Executor:
    places = coordinates(ParallelSpec(tensor_model_parallel_size=tp), tp * dp)
    return Executor("actor", "train", tuple(places), ("actor",), trained=True)


def rows_of_replicas(work: list[TaskWork], executor: Executor) -> dict[int, list[list[int]]]:
    """Rows of each part, by data-parallel rank; the ranks of a replica must agree, and one of them returns outputs."""
    found: dict[int, list[list[int]]] = {}
    for share, place in zip(work, executor.places, strict=True):
        rows = [part.rows.tolist() for part in share.parts]
        assert found.setdefault(place.dp, rows) == rows, "tensor-parallel peers got different rows"
    handing_in = [place.dp for share, place in zip(work, executor.places, strict=True) if share.is_output_rank]
    assert sorted(handing_in) == sorted(found)
    return found


layouts = st.tuples(st.integers(1, 4), st.integers(1, 5))
"""Tensor-parallel and data-parallel ranks."""
batches = st.fixed_dictionaries(
    {
        "groups": st.integers(1, 9),
        "group_size": st.integers(1, 4),
        "shards": st.integers(1, 5),
        "lengths": st.lists(st.integers(0, 50), min_size=1, max_size=12),
        "producers": st.integers(1, 3),
        "sizes": st.lists(st.integers(1, 4), max_size=3),
    }
)


@given(layout=layouts, batch=batches)
def test_each_row_of_a_run_goes_to_one_replica_with_the_sources_of_its_columns(lab, layout, batch) -> None:
    step, executor = Step(lab, **batch), actor(*layout)
    for shard in step.shards:
        work = step.share(REF, executor, (shard,))
        given_out = rows_of_replicas(work, executor)
        wanted = step.index.rows((shard,)).tolist()
        assert sorted(row for parts in given_out.values() for rows in parts for row in rows) == wanted
        for part in (part for share in work for part in share.parts):
            assert part.index == shard
            assert step.fetched(part) == dict.fromkeys(INPUTS, sorted(part.rows.tolist()))


@given(batch=batches, data=st.data())
def test_a_chunk_holds_all_samples_of_its_prompts_with_the_sources_of_their_columns(lab, batch, data) -> None:
    step = Step(lab, **batch)
    groups = data.draw(st.permutations(range(batch["groups"])))[: data.draw(st.integers(1, batch["groups"]))]
    begun = {group: PartialRollout(f"begun {group}", np.arange(2)) for group in range(0, batch["groups"], 2)}
    run, pipeline = Run(5, "rollout", step.shards), Pipeline.model_validate(step.declared)
    work = dispatch_chunk(run, ROLLOUT, step.index, pipeline, groups, committed=4, begun=begun)
    (part,) = work.parts
    assert part.rows.tolist() == [*chain(*(step.rows_of_group[group] for group in groups))]
    assert step.fetched(part) == dict.fromkeys(INPUTS, sorted(part.rows.tolist()))
    assert (type(work), work.is_output_rank, work.committed) == (RolloutWork, True, 4)
    assert set(work.begun) == {group for group in groups if group % 2 == 0}


@given(
    mini_batches=st.integers(1, 4),
    prompts=st.integers(1, 3),
    more=st.integers(1, 4),
    group_size=st.integers(1, 3),
    data=st.data(),
)
def test_mini_batches_are_of_the_prompts_that_over_sampling_has_left(
    lab, mini_batches: int, prompts: int, more: int, group_size: int, data
) -> None:
    needed = mini_batches * prompts
    step = Step(lab, needed + more, group_size, 2, [3])
    step.declared["data"]["prompts_per_step"] = needed
    step.index.expect("rollout", choose=needed)
    order = data.draw(st.permutations(range(needed + more)))
    step.index.arrived("rollout", step.index.rows_of(order))
    (share,) = step.share(UPDATE, actor(1, 1), mini_batch=prompts)
    chosen = sorted(order[:needed])
    expected = [chosen[begin : begin + prompts] for begin in range(0, needed, prompts)]
    assert [sorted(set((part.rows // group_size).tolist())) for part in share.parts] == expected
    assert all(len(part.rows) == prompts * group_size for part in share.parts)


@given(layout=layouts, batch=batches, mini_batches=st.integers(1, 4), prompts=st.integers(1, 3))
def test_mini_batches_hold_whole_prompts_in_order(lab, layout, batch, mini_batches: int, prompts: int) -> None:
    step = Step(lab, **{**batch, "groups": mini_batches * prompts})
    executor = actor(*layout)
    work = step.share(UPDATE, executor, mini_batch=prompts)
    given_out = rows_of_replicas(work, executor)
    assert [part.index for part in work[0].parts] == list(range(mini_batches))
    for index in range(mini_batches):
        together = sorted(row for parts in given_out.values() for row in parts[index])
        assert together == [*chain(*step.rows_of_group[index * prompts : (index + 1) * prompts])]


def test_without_mini_batches_an_update_takes_the_whole_step(lab) -> None:
    step = Step(lab, groups=4, group_size=2, shards=2, lengths=[1])
    (share,) = step.share(UPDATE, actor(1, 1))
    assert [part.rows.tolist() for part in share.parts] == [list(range(8))]


@given(layout=layouts, batch=batches)
def test_a_task_that_compares_the_rows_of_a_group_gets_them_on_one_replica(lab, layout, batch) -> None:
    step, executor = Step(lab, **batch), actor(*layout)
    work = step.share(replace(UPDATE, whole_groups=True), executor)
    holders: dict[int, set[int]] = {}
    for replica, parts in rows_of_replicas(work, executor).items():
        for row in (row for rows in parts for row in rows):
            holders.setdefault(row // step.group_size, set()).add(replica)
    assert set(map(len, holders.values())) == {1}
    assert len(holders) == batch["groups"]


def test_replicas_are_balanced_by_tokens(lab) -> None:
    step = Step(lab, groups=4, group_size=1, shards=1, lengths=[9, 1, 2, 6])
    first, second = step.share(REF, actor(1, 2))
    assert [share.parts[0].rows.tolist() for share in (first, second)] == [[0], [1, 2, 3]]


@given(servers=st.integers(1, 3), slots=st.integers(1, 4), batch=batches)
def test_only_the_first_slot_of_a_server_gets_rows(lab, servers: int, slots: int, batch) -> None:
    step = Step(lab, **batch)
    places = [Coordinates(slot, 0, server, 0, primary=slot == 0) for server in range(servers) for slot in range(slots)]
    wise = Executor("wise", "train", tuple(places), ("wise",), are_servers=True)
    work = step.share(replace(REF, op="judge", engine="wise", executor="wise"), wise)
    given_out = [row for share in work for part in share.parts for row in part.rows.tolist()]
    assert sorted(given_out) == [*chain(*step.rows_of_group)]
    for share, place in zip(work, places, strict=True):
        assert share.is_output_rank == place.primary
        assert place.primary or not share.parts


def test_one_cpu_worker_takes_the_whole_run(lab) -> None:
    step = Step(lab, groups=4, group_size=2, shards=2, lengths=[5, 1], producers=2)
    host = Executor(HOST, None, tuple(Coordinates(0, 0, rank, 0, primary=True) for rank in range(3)))
    (share,) = step.share(REWARD, host, (1,))
    assert [(part.index, part.rows.tolist()) for part in share.parts] == [(1, [4, 5, 6, 7])]
    assert share.is_output_rank
    (share,) = step.share(SAMPLES, host)
    assert [part.rows.tolist() for part in share.parts] == [list(range(8))], "an op of the whole batch has one part"


def test_a_shard_without_rows_is_no_work(lab) -> None:
    step = Step(lab, groups=2, group_size=3, shards=4, lengths=[1])
    executor = actor(1, 1)
    assert [len(step.index.rows((shard,))) for shard in step.shards] == [0, 3, 0, 3]
    (share,) = step.share(REF, executor, (0,))
    assert share.parts == ()


def test_a_replica_without_rows_still_gets_its_columns(lab) -> None:
    step = Step(lab, groups=1, group_size=2, shards=1, lengths=[4])
    executor = actor(1, 3)
    idle = [share.parts[0] for share in step.share(REF, executor) if len(share.parts[0].rows) == 0]
    assert len(idle) == 1
    assert {column for source in idle[0].sources for column in source.columns} == set(INPUTS)


def test_the_source_has_no_rows_to_begin_with(lab) -> None:
    prompts = replace(SAMPLES, name="prompts", node="prompts", op="prompts", inputs={}, outputs={"answer": "answer"})
    step = Step(lab, groups=2, group_size=2, shards=2, lengths=[1])
    (share,) = step.share(prompts, Executor(HOST, None, (Coordinates(0, 0, 0, 0, primary=True),)))
    assert share.parts == ()
    assert (share.prompts, share.committed, share.shards, share.ahead) == ((), 4, 2, ())
    assert type(share) is SourceWork
    assert share.node is None, "prompts is not declared"


@pytest.mark.parametrize("frozen", [False, True])
def test_work_says_what_to_run_and_where_its_columns_go(lab, frozen: bool) -> None:
    step = Step(lab, groups=2, group_size=2, shards=1, lengths=[1])
    validation = replace(REF, name="val/ref", rows=Rows.VALIDATION, frozen=frozen)
    (share,) = step.share(validation, actor(1, 1))
    assert isinstance(share, ScoreWork)
    assert (share.step, share.task, share.node, share.op) == (5, "val/ref", "ref", "logprob")
    assert (share.validation, share.frozen, share.outputs) == (True, frozen, {"logprob": "ref_logprob"})


def test_pieces_of_an_update_are_its_mini_batches_and_know_which_comes_first_and_last(lab) -> None:
    step, executor = Step(lab, groups=6, group_size=2, shards=6, lengths=[7, 3, 9, 1]), actor(1, 2)
    pieces = ((0, 1), (2, 3), (4, 5))
    whole = step.share(UPDATE, executor, mini_batch=2)
    assert [(share.begins, share.ends) for share in whole] == [(True, True)] * 2
    taken = [step.share(replace(UPDATE, pieces=pieces), executor, piece, mini_batch=2) for piece in pieces]
    assert [[(share.begins, share.ends) for share in work] for work in taken] == [
        [(True, False)] * 2,
        [(False, False)] * 2,
        [(False, True)] * 2,
    ]
    for rank in range(2):
        rows = [part.rows.tolist() for part in whole[rank].parts]
        assert [part.rows.tolist() for work in taken for part in work[rank].parts] == rows


@given(mini_batches=st.integers(1, 4), prompts=st.integers(1, 3), returned=st.integers(0, 9))
def test_returned_groups_are_spread_over_the_mini_batches(lab, mini_batches: int, prompts: int, returned: int) -> None:
    needed, size = mini_batches * prompts, 2
    step = Step(lab, needed, size, 2, [3])
    (before,) = step.share(UPDATE, actor(1, 1), mini_batch=prompts)
    rows = np.arange(needed * size, (needed + returned) * size)
    for task in ("rollout", "prompts"):
        step.index.extend(task, Block(rows, "returned", np.full(len(rows), 5), 0.0, 1.0))
    (share,) = step.share(UPDATE, actor(1, 1), mini_batch=prompts)
    assert len(share.parts) == mini_batches
    added = []
    for part, own in zip(share.parts, before.parts, strict=True):
        assert part.rows[: len(own.rows)].tolist() == own.rows.tolist()
        added.append(part.rows[len(own.rows) :].tolist())
    assert [*chain(*added)] == rows.tolist()
    assert max(map(len, added)) - min(map(len, added)) <= size
