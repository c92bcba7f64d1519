"""Sources of prompts in a pipeline file: their forms, their paths, and how they are merged."""

from __future__ import annotations

from pathlib import Path

import pytest

from dagrl.config.errors import PipelineError
from dagrl.config.loading.loader import load_pipeline
from dagrl.config.schema import DataSpec

TRAIN = "train: train.parquet"


@pytest.fixture
def data_of(project):
    def load(train: str, *more: str) -> DataSpec:
        return load_pipeline(project.pipeline((TRAIN, f"train: {train}")), more).pipeline.data

    return load


@pytest.mark.parametrize(
    ("train", "paths"),
    [
        ("a.parquet", {"train": ["a.parquet"]}),
        ("parts/*.parquet", {"train": ["parts/*.parquet"]}),
        ("[a.parquet, parts/*.jsonl]", {"train": ["a.parquet", "parts/*.jsonl"]}),
        ("{path: a.parquet, prompt_key: question}", {"train": ["a.parquet"]}),
        ("{path: [a.parquet, b.parquet], weight: 2}", {"train": ["a.parquet", "b.parquet"]}),
        (
            "{sums: a.parquet, more: {path: [b.jsonl, c.jsonl], weight: 3}}",
            {"sums": ["a.parquet"], "more": ["b.jsonl", "c.jsonl"]},
        ),
        # Names of the keys of a source, and of other sections with paths, are names too.
        ("{hub: {hub: me/data}, model: a.parquet}", {"hub": [], "model": ["a.parquet"]}),
        ("{model: {path: a/b}, environment: env}", {"model": ["a/b"], "environment": ["env"]}),
        ("{weight: {path: a}, name: {path: b}}", {"weight": ["a"], "name": ["b"]}),
    ],
)
def test_forms_of_sources(project, data_of, train, paths) -> None:
    found = {name: [*each.paths] for name, each in data_of(train).sources.items()}
    assert found == {name: [project.folder / path for path in each] for name, each in paths.items()}


def test_paths_are_those_of_the_file_that_names_them_or_of_the_working_directory(project, monkeypatch, tmp_path):
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    path = project.pipeline((TRAIN, "train: {sums: [a.parquet, ~/b.parquet]}"))
    child = project.write("sub/child.yaml", "extends: ../p.yaml\ndata: {train: {more: c/*.parquet}}\n")
    data = load_pipeline(child, ["data.train.mine=d.parquet", "data.val=[e.parquet, f.parquet]"]).pipeline.data
    assert {name: each.paths for name, each in data.sources.items()} == {
        "sums": (path.parent / "a.parquet", Path.home() / "b.parquet"),
        "more": (path.parent / "sub/c/*.parquet",),
        "mine": (tmp_path / "work/d.parquet",),
    }
    assert data.val_sets["val"].paths == (tmp_path / "work/e.parquet", tmp_path / "work/f.parquet")


@pytest.mark.parametrize(
    ("parent", "child", "names"),
    [
        ("{a: a.parquet}", "{b: b.parquet}", ["a", "b"]),
        ("{a: a.parquet, b: b.parquet}", "{a: null}", ["b"]),
        ("{a: {path: a.parquet, weight: 2}}", "{a: {weight: 3}}", ["a"]),
        ("a.parquet", "{b: b.parquet}", ["b"]),
        ("{path: a.parquet, prompt_key: q}", "{b: b.parquet}", ["b"]),
        ("{a: a.parquet}", "{path: b.parquet, prompt_key: q}", ["train"]),
        ("{path: a.parquet}", "{weight: 2}", ["train"]),
        ("[a.parquet]", "{weight: {path: b}}", ["weight"]),
        ("{path: a.parquet}", "{sampling: {temperature: 0.7, max_new_tokens: 3}}", ["train"]),
        ("{path: a.parquet, sampling: {max_new_tokens: 3}}", "{sampling: {temperature: 0.7}}", ["train"]),
        ("{a: a.parquet}", "{a: {path: a.parquet, sampling: {max_new_tokens: 3}}}", ["a"]),
        ("{a: a.parquet}", "{sampling: {path: b.parquet}}", ["a", "sampling"]),
        ("{a: a.parquet, sampling: {path: b.parquet}}", "{sampling: {weight: 2}}", ["a", "sampling"]),
        (
            "{a: a.parquet, sampling: {path: b.parquet}}",
            "{sampling: {sampling: {max_new_tokens: 3}}}",
            ["a", "sampling"],
        ),
    ],
)
def test_names_are_merged_and_replace_a_single_source(project, parent, child, names) -> None:
    project.pipeline((TRAIN, f"train: {parent}"))
    path = project.write("child.yaml", f"extends: p\ndata: {{train: {child}}}\n")
    assert [*load_pipeline(path).pipeline.data.sources] == names


def test_a_pipeline_with_sources_is_the_same_from_any_folder(project) -> None:
    loaded = load_pipeline(project.pipeline((TRAIN, "train: {a: [a.parquet], b: {path: 'b/*', weight: 2}}")))
    assert load_pipeline(project.write("sub/written.yaml", loaded.to_yaml())).pipeline == loaded.pipeline


@pytest.mark.parametrize(
    ("train", "place", "message"),
    [
        ("3", "data.train", "it must be text"),
        ("[]", "data.train", "at least 1"),
        ("{}", "data.train", "at least 1"),
        ("[a.parquet, 3]", "data.train[1]", "it must be text"),
        ("{a: 3}", "data.train.a", "it must be text"),
        ("{A: a.parquet}", "data.train.A", "is not a name"),
        ("{path: a, prompt_ky: q}", "data.train.prompt_ky", "did you mean `prompt_key`?"),
        ("{a: {path: a, promt_key: q}}", "data.train.a.promt_key", "did you mean `prompt_key`?"),
        ("{pth: a, prompt_key: q}", "data.train.pth", "did you mean `path`?"),
        ("{a: {weight: 2}}", "data.train.a", "needs `path` or `hub`; add one"),
        ("{path: a, hub: me/data}", "data.train", "keep one"),
        ("{path: a, streamed: true}", "data.train", "`streamed` is for data sets of the Hub"),
        ("{hub: nothing}", "data.train.hub", "match pattern"),
        ("{path: a, weight: -1}", "data.train.weight", "greater than or equal to 0"),
        ("{a: {path: a, weight: .inf}, b: b}", "data.train.a.weight", "finite"),
        ("{path: a, weight: 0}", "data.train", "each source has the weight 0"),
        ("{a: {path: a, weight: 0}, b: {path: b, weight: 0}}", "data.train", "each source has the weight 0"),
        ("{path: a, val_n: 3}", "data.train.val_n", "unknown key `val_n`"),
    ],
)
def test_sources_that_are_none(project, train, place, message) -> None:
    with pytest.raises(PipelineError) as caught:
        load_pipeline(project.pipeline((TRAIN, f"train: {train}")))
    (problem,) = caught.value.problems
    assert (problem.line, problem.place) == (6, place)
    assert message in problem.message
