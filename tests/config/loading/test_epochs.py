"""A run's length in passes over its prompts."""

from __future__ import annotations

from pathlib import Path

import pytest

from dagrl.config.errors import PipelineError
from dagrl.config.loading.loader import load_pipeline
from dagrl.config.schema.run import UNKNOWN_STEPS

STEPS = ("run: {steps: 10}", "run: {epochs: 2}")
"""Of a project with 32 prompts, 8 in a step."""


@pytest.mark.parametrize(
    ("overrides", "steps"),
    [
        ([], 8),
        (["run.epochs=1"], 4),
        (["run.epochs=0.5"], 2),
        # 35.2 prompts, rounded up to 36, and 5 steps.
        (["run.epochs=1.1"], 5),
        (["run.epochs=0.001"], 1),
        # 3.0000000000000004 passes in floats.
        (["run.epochs=0.30000000000000004", "data.prompts_per_step=1"], 10),
        (["run.epochs=3", "data.prompts_per_step=7"], 14),
        (["data.prompts_per_step=64"], 1),
        (["data.prompts_per_step=65"], 1),
        (["data.prompts_per_step=null", "data.prompts_per_node=4", "groups.train.nodes=2"], 8),
        (["run.epochs=null", "run.steps=3"], 3),
        (["data.train=gone.parquet"], UNKNOWN_STEPS),
        (["data.train=p.yaml"], UNKNOWN_STEPS),
        (["data.train=."], 8),
        (["data.train=[train.parquet, more.jsonl]"], 9),
        (["data.train={a: train.parquet, b: {path: '*.jsonl', weight: 3}}"], 9),
        (["data.train=[train.parquet, gone.jsonl]"], UNKNOWN_STEPS),
        (["data.train={hub: me/data}"], UNKNOWN_STEPS),
    ],
)
def test_epochs_become_steps_by_the_rows_of_the_file(project, monkeypatch, overrides, steps) -> None:
    monkeypatch.chdir(project.folder)
    (project.folder / "more.jsonl").write_text('{"prompt": "1+1="}\n' * 3)
    run = load_pipeline(project.pipeline(STEPS), overrides).pipeline.run
    assert run.steps == steps
    assert run.known_steps == (None if steps == UNKNOWN_STEPS else steps)
    assert not run.only_validates


def test_a_pipeline_that_is_written_down_has_its_epochs_again(project) -> None:
    loaded = load_pipeline(project.pipeline(STEPS))
    written = project.write("written.yaml", loaded.to_yaml())
    assert load_pipeline(written).pipeline == loaded.pipeline
    # The file may grow before the run goes on.
    project.write_rows("train.parquet", [{"prompt": "1+1="}] * 40)
    assert load_pipeline(written).pipeline.run.steps == 10


@pytest.mark.parametrize(
    ("run", "place", "code"),
    [
        ("steps: 10, epochs: 2", "run.epochs", "length-set-twice"),
        ("epochs: 0", "run.epochs", "greater than 0"),
        ("epochs: two", "run.epochs", "a number"),
        ("epochs: .inf", "run.epochs", "finite"),
        ("epochs: 1e9", "run.epochs", "less than or equal to"),
        ("seed: 1", "run.steps", "missing-key"),
    ],
)
def test_lengths_that_are_none(project, run, place, code) -> None:
    with pytest.raises(PipelineError) as caught:
        load_pipeline(project.pipeline(("run: {steps: 10}", f"run: {{{run}}}")))
    (problem,) = caught.value.problems
    assert problem.place == place
    assert code in (problem.code, problem.message) or code in problem.message


def test_steps_of_a_template_are_taken_out(project) -> None:
    child = project.write("child.yaml", "extends: p.yaml\nrun: {steps: null, epochs: 1}\n")
    assert load_pipeline(Path(child)).pipeline.run.steps == 4
