"""Trackers: their settings, those that are not installed, and those of the user."""

from __future__ import annotations

import importlib.util

import pytest

from dagrl.validation import check_file, run

TRACKED = ("run: {steps: 10}", "run: {steps: 10}\ntrack: [console, swanlab, mlflow]")


def test_a_tracker_that_is_not_here_is_a_warning(project, monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(run, "find_spec", lambda name: None if name == "mlflow" else real(name))
    (warning,) = check_file(project.pipeline(TRACKED)).warnings
    assert warning.place == "track[2]"
    assert warning.code == "missing-package"


def test_one_that_is_here_is_none(project) -> None:
    assert check_file(project.pipeline(TRACKED)).warnings == ()


OWN = """
class Good:
    def __init__(self, url, level=1): ...
    def start(self, run_dir, config, resumed_step): ...
    def log(self, step, metrics): ...
    def close(self, ok): ...

class Silent(Good):
    log = None

class Short(Good):
    def log(self, metrics): ...

class Shows(Good):
    def samples(self, table): ...

def function(): ...
"""


@pytest.mark.parametrize(
    "track",
    [
        "[wandb]",
        "[console, {tracker: wandb, project: sums, entity: us, group: first, name: third}]",
        "[{tracker: swanlab, project: sums, entity: us, group: first, name: third}]",
        "[{tracker: mlflow, project: sums, name: third}]",
        "[{tracker: console}, {tracker: tensorboard}]",
        "[{tracker: 'own_trackers:Good', args: {url: here}}, {tracker: 'own_trackers:Good', args: {url: there}}]",
        "[]",
    ],
)
def test_trackers_have_settings(project, track) -> None:
    project.write("own_trackers.py", OWN)
    assert check_file(project.pipeline((TRACKED[0], f"{TRACKED[0]}\ntrack: {track}"))).warnings == ()


@pytest.mark.parametrize(
    ("track", "place", "code", "named"),
    [
        ("[wandd]", "track[0]", "unknown-option", ["did you mean `wandb`"]),
        ("[{tracker: wandd}]", "track[0].tracker", "unknown-option", ["did you mean `wandb`"]),
        ("[{tracker: wandb, projct: sums}]", "track[0].projct", "unknown-key", ["did you mean `project`"]),
        ("[{project: sums}]", "track[0].tracker", "missing-key", ["tracker"]),
        ("[{tracker: wandb, project: 3}]", "track[0].project", "invalid-value", ["text"]),
        ("[{tracker: wandb, project: ''}]", "track[0].project", "invalid-value", []),
        ("[3]", "track[0]", "unknown-option", ["module:function"]),
        ("wandb", "track", "invalid-value", ["list"]),
        ("[console, {tracker: tensorboard, name: x}]", "track[1].name", "option-without-effect", []),
        ("[{tracker: mlflow, group: x}]", "track[0].group", "option-without-effect", ["mlflow"]),
        ("[{tracker: wandb, args: {x: 1}}]", "track[0].args", "option-without-effect", []),
        ("['own_trackers:Good']", "track[0]", "invalid-tracker", ["url"]),
        ("[{tracker: 'own_trackers:Good', args: {url: x, lvl: 2}}]", "track[0]", "invalid-tracker", ["lvl"]),
        (
            "[{tracker: 'own_trackers:Good', args: {url: x}, project: y}]",
            "track[0].project",
            "option-without-effect",
            [],
        ),
        ("[{tracker: 'own_trackers:Silent', args: {url: x}}]", "track[0]", "invalid-tracker", ["no method log"]),
        ("[{tracker: 'own_trackers:Short', args: {url: x}}]", "track[0]", "invalid-tracker", ["log"]),
        ("[{tracker: 'own_trackers:Shows', args: {url: x}}]", "track[0]", "invalid-tracker", ["samples"]),
        ("['own_trackers:function']", "track[0]", "invalid-tracker", ["is no class"]),
        ("['own_trackers:Goods']", "track[0]", "invalid-tracker", ["Goods"]),
        ("['no_trackers:Good']", "track[0]", "invalid-tracker", ["no_trackers"]),
    ],
)
def test_trackers_that_are_wrong(project, track, place, code, named) -> None:
    project.write("own_trackers.py", OWN)
    path = project.pipeline((TRACKED[0], f"{TRACKED[0]}\ntrack: {track} #!"))
    problem = project.only_problem(path)
    assert (problem.place, problem.code) == (place, code)
    assert all(word in problem.message for word in named), problem.message
