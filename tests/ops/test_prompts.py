"""The source: which rows a step's batch has, and how they are cut into shards."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from work import changed

from dagrl.config.columns import SOURCE_COLUMNS
from dagrl.data.batch import Batch
from dagrl.data.order.sampler import prompt_id
from dagrl.ops.prompts import prompts
from dagrl.orchestrator.steps.batch_index import BatchIndex
from dagrl.workers.messages import Block


def whole(outputs) -> Batch:
    return Batch.concat([Batch(output.rows, output.columns) for output in outputs])


@pytest.fixture
def trained_on(bench):
    bench.write_prompts("train.parquet")

    def context(n=2, **options):
        data = {"train": bench.folder / "train.parquet", **options.pop("data", {})}
        rollout = {"op": "rollout", "engine": "generator", "n": n, "sampling": {"max_new_tokens": 3}}
        return bench.context(data=data, nodes={"rollout": rollout}, **options)

    return context


@pytest.mark.parametrize(("count", "n", "shards"), [(4, 3, 2), (5, 2, 3), (1, 4, 1), (2, 1, 5)])
def test_each_prompt_comes_n_times_in_shards_of_whole_groups(bench, trained_on, texts, count, n, shards) -> None:
    outputs = list(prompts((), trained_on(n, shards=shards, data={"prompts_per_step": count})))
    assert [output.shards for output in outputs] == [(shard,) for shard in range(shards)]
    batch = whole(outputs)
    assert set(batch.columns) == set(SOURCE_COLUMNS)
    assert batch.rows.tolist() == batch["sample_id"].values.tolist() == list(range(count * n))
    assert batch["group_id"].values.tolist() == [group for group in range(count) for _ in range(n)]
    assert texts(batch["prompt_tokens"]) == [text for text in bench.questions[:count] for _ in range(n)]
    groups = [set(output.columns["group_id"].values.tolist()) for output in outputs]
    assert sum(len(each) for each in groups) == count, "a group lies in two shards"


def test_the_texts_of_a_prompt_go_with_each_of_its_rows(trained_on) -> None:
    batch = whole(prompts((), trained_on(2, data={"prompts_per_step": 2})))
    assert batch["answer"].strings() == ["0", "0", "1", "1"]
    assert batch["data_source"].strings() == ["source 0", "source 0", "source 1", "source 1"]
    assert batch["data_set"].strings() == ["train"] * 4
    assert batch["extra_info"].strings() == ['{"index": 0}'] * 2 + ['{"index": 1}'] * 2


def test_a_further_round_continues_the_group_ids_and_takes_the_requested_prompts(bench, trained_on, texts) -> None:
    context = trained_on(2, shards=2, data={"prompts_per_step": 4})
    outputs = list(prompts((), changed(context, first_group=4, prompts=(1, 2, 3))))
    batch = whole(outputs)
    assert batch["group_id"].values.tolist() == [4, 4, 5, 5, 6, 6]
    assert batch.rows.tolist() == batch["sample_id"].values.tolist() == [*range(8, 14)]
    assert texts(batch["prompt_tokens"])[::2] == list(bench.questions[1:4])
    assert np.concatenate([output.prompts for output in outputs]).tolist() == [1, 2, 3]


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
@given(
    own=st.lists(st.sampled_from([None, 1, 3, 6]), min_size=2, max_size=3),
    order=st.lists(st.integers(0, 2), min_size=1, max_size=7),
    shards=st.integers(1, 4),
    first=st.integers(0, 3),
)
def test_each_source_has_its_own_number_of_rows(bench, texts, own, order, shards, first) -> None:
    names = ["sums", "code", "maths"][: len(own)]
    train = {
        name: bench.write_prompts(f"{name}.parquet", [f"{place}+{row}=" for row in range(7)])
        for place, name in enumerate(names)
    }
    train = {name: {"path": path} | ({"n": n} if n else {}) for (name, path), n in zip(train.items(), own, strict=True)}
    rollout = {"op": "rollout", "engine": "generator", "n": 2, "sampling": {"max_new_tokens": 3}}
    context = bench.context(data={"train": train}, nodes={"rollout": rollout}, shards=shards)
    sources = [each % len(names) for each in order]
    ids = tuple(prompt_id(source, row) for row, source in enumerate(sources))
    outputs = list(prompts((), changed(context, prompts=ids, first_group=first)))
    batch, ns = whole(outputs), [own[source] or 2 for source in sources]
    stride, groups = max(n or 2 for n in own), range(len(ns))
    assert batch.rows.tolist() == [(first + group) * stride + row for group in groups for row in range(ns[group])]
    assert batch["group_id"].values.tolist() == [first + group for group in groups for _ in range(ns[group])]
    assert batch["data_set"].strings() == [names[sources[group]] for group in groups for _ in range(ns[group])]
    expected = [f"{sources[group]}+{group}=" for group in groups for _ in range(ns[group])]
    assert texts(batch["prompt_tokens"]) == expected
    assert np.concatenate([output.prompts for output in outputs]).tolist() == list(ids)
    # The driver finds the same groups.
    index = BatchIndex(stride, shards)
    for output in outputs:
        block = Block(output.rows, "ref", None, 0.0, 1.0, output.shards)
        index.add_source("prompts", block)
    assert index.rows(tuple(range(shards))).tolist() == batch.rows.tolist()
    assert index.rows_of([first + group for group in groups]).tolist() == batch.rows.tolist()


def test_a_source_has_its_own_longest_prompt(bench) -> None:
    path = bench.write_prompts("train.parquet", ("1+1=", "1+1+1="))
    train = {"short": {"path": path, "max_prompt_tokens": 4}, "usual": path}
    context = bench.context(data={"train": train, "max_prompt_tokens": 8})
    ids = [prompt_id(source, row) for source in (0, 1) for row in (0, 1)]
    (output,) = prompts((), changed(context, prompts=tuple(ids)))
    assert output.dropped == (ids[1],)


@pytest.mark.parametrize("overlong", ["drop", "cut"])
def test_only_the_first_shard_reports_cut_prompts_and_too_long_ones_are_all_that_comes(bench, overlong) -> None:
    train = bench.write_prompts("train.parquet", ("1+1=", "1+1+1+1=", "2+2=", "3+3="))
    data = {"train": train, "prompts_per_step": 2, "max_prompt_tokens": 4, "overlong_prompts": overlong}
    context = bench.context(data=data)
    outputs = list(prompts((), context))
    counts = {name: stat.total for name, stat in outputs[0].stats.items()}
    if overlong == "drop":
        assert [(output.dropped, len(output.rows), output.shards) for output in outputs] == [((1,), 0, ())]
        assert counts == {"data/dropped_prompts": 1, "data/cut_prompts": 0}
        outputs = list(prompts((), changed(context, prompts=(0, 2))))
        assert [output.prompts.tolist() for output in outputs] == [[0], [2]]
    else:
        assert counts == {"data/dropped_prompts": 0, "data/cut_prompts": 1}
    assert outputs[1].stats == {}


def test_prompts_come_from_several_sources_in_the_order_of_their_ids(bench, texts) -> None:
    sums, doubles = ("1+1=", "1+2=", "1+3="), ("4+4=", "5+5=")
    sources = {"sums": bench.write_prompts("a.parquet", sums), "doubles": bench.write_prompts("b.parquet", doubles)}
    context = bench.context(data={"train": sources}, shards=2)
    ids = (2, prompt_id(1, 1), 0, prompt_id(1, 0))
    outputs = list(prompts((), changed(context, prompts=ids)))
    batch = whole(outputs)
    assert texts(batch["prompt_tokens"])[::2] == ["1+3=", "5+5=", "1+1=", "4+4="]
    assert batch["data_set"].strings()[::2] == ["sums", "doubles", "sums", "doubles"]
    assert np.concatenate([output.prompts for output in outputs]).tolist() == list(ids)


def test_validation_takes_each_prompt_of_its_own_file_once_in_order(bench, trained_on, texts) -> None:
    questions = tuple(f"{number}+{number}=" for number in range(7))
    data = {"val": bench.write_prompts("val.parquet", questions)}
    context = trained_on(4, validation=True, data=data)
    outputs = list(prompts((), context))
    batch = whole(outputs)
    assert texts(batch["prompt_tokens"]) == list(questions)
    assert batch["group_id"].values.tolist() == list(range(7))
    assert [output.prompts for output in outputs] == [None, None]


def test_validation_can_be_of_some_prompts_of_each_set_only(bench, trained_on, texts) -> None:
    sums, doubles = ("7+1=", "8+1=", "9+1="), ("4+4=", "5+5=", "6+6=")
    sets = {"sums": bench.write_prompts("sums.parquet", sums), "doubles": bench.write_prompts("d.parquet", doubles)}
    batch = whole(prompts((), trained_on(validation=True, data={"val": sets, "val_prompts": 2})))
    found = texts(batch["prompt_tokens"])
    assert batch["data_set"].strings() == ["sums", "sums", "doubles", "doubles"]
    assert set(found[:2]) < set(sums)
    assert set(found[2:]) < set(doubles)
    batch = whole(prompts((), trained_on(validation=True, data={"val": sets["sums"], "val_prompts": 2})))
    assert texts(batch["prompt_tokens"]) == found[:2]


def test_validation_sets_come_one_after_the_other_each_prompt_val_n_times(bench, texts) -> None:
    sets = {"sums": bench.write_prompts("a.parquet", ("1+1=", "1+2=")), "doubles": bench.write_prompts("b.parquet")}
    rollout = {"op": "rollout", "engine": "generator", "n": 5, "val_n": 3, "sampling": {"max_new_tokens": 3}}
    context = bench.context(data={"val": sets}, nodes={"rollout": rollout}, validation=True, shards=3)
    outputs = list(prompts((), context))
    batch = whole(outputs)
    assert batch["data_set"].strings() == ["sums"] * 6 + ["doubles"] * 15
    assert batch["group_id"].values.tolist() == [group for group in range(7) for _ in range(3)]
    assert texts(batch["prompt_tokens"])[::3] == ["1+1=", "1+2=", *bench.questions]
    assert [len(output.rows) % 3 for output in outputs] == [0, 0, 0], "a group lies in two shards"


@pytest.mark.parametrize("ns", [(4, 2), (3, 1), (3, None), (2, 2)])
def test_validation_sets_have_their_own_numbers_of_responses(bench, texts, ns) -> None:
    """A prompt is a group. The ids of groups with fewer rows than the largest have gaps."""
    sums, doubles = ("1+1=", "1+2="), ("4+4=", "5+5=", "6+6=")
    sets = {"sums": bench.write_prompts("a.parquet", sums), "doubles": bench.write_prompts("b.parquet", doubles)}
    val = {name: {"path": path} | ({"n": n} if n else {}) for (name, path), n in zip(sets.items(), ns, strict=True)}
    rollout = {"op": "rollout", "engine": "generator", "n": 5, "val_n": 3, "sampling": {"max_new_tokens": 3}}
    context = bench.context(data={"val": val}, nodes={"rollout": rollout}, validation=True, shards=3)
    batch = whole(prompts((), context))
    first, second = ns[0], ns[1] or 3
    assert texts(batch["prompt_tokens"]) == [*np.repeat(sums, first), *np.repeat(doubles, second)]
    assert batch["data_set"].strings() == ["sums"] * 2 * first + ["doubles"] * 3 * second
    assert batch["group_id"].values.tolist() == [*np.repeat([0, 1], first), *np.repeat([2, 3, 4], second)]
    size, sizes = max(first, second), [first] * 2 + [second] * 3
    assert batch.rows.tolist() == [group * size + row for group, n in enumerate(sizes) for row in range(n)]


def test_prompts_of_all_validation_sets_that_are_left_out_are_counted(bench) -> None:
    sets = {name: bench.write_prompts(f"{name}.parquet", ("1+1=", "1+1+1+1+1=")) for name in ("a", "b")}
    (first, *_) = prompts((), bench.context(data={"val": sets}, validation=True))
    assert first.stats["data/dropped_prompts"].total == 2


def test_a_worker_serves_training_and_validation_from_different_files(bench, trained_on, texts) -> None:
    data = {"val": bench.write_prompts("val.parquet", ("9+9=",)), "prompts_per_step": 1}
    context = trained_on(1, data=data)
    train = whole(prompts((), context))
    val = whole(prompts((), changed(context, validation=True)))
    again = whole(prompts((), context))
    assert [texts(batch["prompt_tokens"]) for batch in (train, val, again)] == [["1+1="], ["9+9="], ["1+1="]]


def test_a_worker_reads_its_file_once(bench, trained_on) -> None:
    context = trained_on()
    list(prompts((), context))
    (bench.folder / "train.parquet").unlink()
    assert len(whole(prompts((), changed(context, prompts=(4, 0, 1, 2))))) == 8
