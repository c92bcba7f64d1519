"""Orders of prompts that a run cannot use."""

from __future__ import annotations

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dagrl.config.errors import PipelineError
from dagrl.data.sources import parts
from dagrl.validation import check_file

TWO = "train: {easy: {path: train.parquet, weight: 3}, hard: train.parquet}\n  order: "
MODULE = """
class Good:
    def __init__(self, sources, seed, step=1): ...
    def take(self, count, step): ...
    def state(self): ...
    def load(self, state): ...

class Forgets(Good):
    load = None

class Hurries(Good):
    def take(self, count): ...

def function(): ...
"""

PROBLEMS = {
    "no order": ("shufled", "`shufled` is not an order; write shuffled, file, your own as `module:Class`, or a"),
    "a truth": ("true", "must be text"),
    "the former key": ("file\n  shuffle: true", "`shuffle` is now `order`: write `order: shuffled`"),
    "two orders of rows": ("{by: index, adaptive: {}}", "has both `by` and `adaptive`; keep one"),
    "a sampler and stages": ("{sampler: 'mine:Good', by: index}", "`sampler` replaces `by`, `adaptive` and `stages`"),
    "arguments of nothing": ("{args: {a: 1}}", "`args` needs `sampler`; add it"),
    "a direction of nothing": ("{descending: true}", "`descending` needs `by`; add the column"),
    "an unknown source": ("{stages: [{weights: {esy: 1}}]}", "there is no source `esy`; did you mean `easy`?"),
    "no weight": ("{stages: [{weights: {easy: 0}}]}", "each source has the weight 0"),
    "a negative weight": ("{stages: [{weights: {easy: -1}}]}", "must be greater than or equal to 0"),
    "a stage without an end": ("{stages: [{weights: {easy: 1}}, {weights: {hard: 1}}]}", "stage 1 has no end; give it"),
    "a first stage that moves": ("{stages: [{weights: {easy: 1}, move_over: 3}]}", "the first stage has nothing to"),
    "stages that go back": (
        "{stages: [{weights: {easy: 1}, until_step: 5}, {weights: {hard: 1}, until_step: 5}]}",
        "the stage before ends at step 5; give a later step",
    ),
    "a metric that nothing measures": (
        "{stages: [{weights: {easy: 1}, until_metric: {val/reward/mean: 1}}, {weights: {hard: 1}}]}",
        "nothing measures `val/reward/mean`; set `run.validate_every`",
    ),
    "a band that ends before it begins": ("{adaptive: {band: [0.8, 0.2]}}", "`band` ends at 0.2 before it begins"),
    "a band of percent": ("{adaptive: {band: [0.2, 80]}}", "must be less than or equal to 1"),
    "a missing sampler": ("'mine:God'", "has no function 'God'; did you mean `Good`?"),
    "a missing module": ("'yours:Good'", "there is no module 'yours'; put yours.py beside the pipeline file"),
    "no class": ("'mine:function'", "`mine:function` is no class; a sampler is one with take(count, step)"),
    "no load": ("'mine:Forgets'", "`mine:Forgets` has no method load; a sampler has take"),
    "another take": ("'mine:Hurries'", "`mine:Hurries.take` cannot be called"),
    "another argument": ("{sampler: 'mine:Good', args: {stp: 1}}", "`mine:Good` cannot be called: got an unexpected"),
}


@pytest.mark.parametrize(("order", "words"), PROBLEMS.values(), ids=PROBLEMS)
def test_a_wrong_order_is_one_problem_with_its_line(project, order: str, words: str) -> None:
    (project.folder / "mine.py").write_text(MODULE)
    with pytest.raises(PipelineError) as raised:
        check_file(project.pipeline(("train: train.parquet", TWO + order)))
    (problem,) = raised.value.problems
    assert words in problem.message
    assert problem.place.startswith("data.")


@pytest.mark.parametrize(
    "order",
    [
        "file",
        "{by: reward_model.ground_truth, descending: true}",
        "{adaptive: {}, stages: [{weights: {easy: 1}, until_metric: {reward/mean: 0.5}}, {weights: {hard: 2}}]}",
        "'mine:Good'",
        "{sampler: 'mine:Good', args: {step: 2}}",
    ],
)
def test_orders_that_work(project, order: str) -> None:
    (project.folder / "mine.py").write_text(MODULE)
    assert check_file(project.pipeline(("train: train.parquet", TWO + order))).warnings == ()


def test_weights_by_tokens_of_one_source_are_a_warning(project) -> None:
    path = project.pipeline(("train: train.parquet", "train: train.parquet\n  weights_by: tokens"))
    (warning,) = check_file(path).warnings
    assert warning.message.startswith("there is one source, so that weights have no effect; remove it")


@pytest.mark.parametrize("ending", ["jsonl", "json", "parquet"])
@pytest.mark.parametrize(("column", "works"), [("index", True), ("extra_info.steps", True), ("indx", False)])
def test_a_column_is_looked_for_without_a_copy_of_the_file(
    project, tmp_path, monkeypatch, ending, column, works
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(parts, "_LARGE_FILE", 0)
    monkeypatch.setattr(parts, "_LARGE_GROUP", 0)
    table = pq.read_table(project.folder / "train.parquet")
    rows = [row | {"index": 1, "extra_info": {"steps": 2}} for row in table.to_pylist()]
    if ending == "parquet":
        pq.write_table(table.from_pylist(rows), project.folder / "sorted.parquet")
    else:
        lines = "\n".join(map(json.dumps, rows))
        text = lines if ending == "jsonl" else json.dumps(rows)
        (project.folder / f"sorted.{ending}").write_text(text)
    path = project.pipeline(("train: train.parquet", f"train: sorted.{ending}\n  order: {{by: {column}}} #!"))
    if works:
        check_file(path)
    else:
        assert "did you mean `index`?, or set data.order.by" in project.only_problem(path).message
    assert not (tmp_path / "cache").exists()


def test_two_columns_of_the_name_to_sort_by(project):
    table = pq.read_table(project.folder / "train.parquet")
    index = pa.array(range(len(table)))
    table = table.append_column("index", index).append_column("index", index)
    pq.write_table(table, project.folder / "train.parquet")
    path = project.pipeline(("train: train.parquet", "train: train.parquet\n  order: {by: index} #!"))
    assert "has 2 columns `index`; keep one of them" in project.only_problem(path).message
