"""Trackers that are not installed."""

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
