"""A backend of another package, in one folder, is found by its entry point: it validates, plans and runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from lab import tiny_pipeline, write_pipeline

BACKENDS = Path(__file__).parent
SOFTWARE = """
from dagrl.doctor import software

# The packages of the other backends take long to import.
software.run_python = lambda code: ("", "")
print({each.name: each.text for each in software.software(on_gpus=False)}["backend repeat"])
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """Runs Python where the package `repeat_backend` is installed."""
    site = tmp_path_factory.mktemp("site")
    info = site / "repeat_backend-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: repeat-backend\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[dagrl.backends]\nrepeat = repeat_backend\n")
    variables = os.environ | {"PYTHONPATH": f"{site}:{BACKENDS}"}

    def call(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, *arguments]
        return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=240)

    return call


@pytest.fixture(scope="module")
def dagrl(python):
    """Runs `dagrl` there."""
    return partial(python, "-m", "dagrl")


@pytest.fixture
def pipeline(tmp_path: Path) -> Path:
    tree: dict[str, Any] = tiny_pipeline()
    tree["engines"]["generator"] = {"backend": "repeat", "group": "rollout", "weights_from": "actor", "times": 2}
    tree["run"] = {"steps": 1}
    return write_pipeline(tmp_path, tree)


def test_it_validates_its_own_options(dagrl, pipeline) -> None:
    done = dagrl("validate", str(pipeline))
    assert done.returncode == 0, done.stderr
    assert "repeat" in done.stdout
    wrong = dagrl("validate", str(pipeline), "engines.generator.times=0")
    assert wrong.returncode == 2 and "times" in wrong.stderr and "must be at least 1" in wrong.stderr


def test_it_plans(dagrl, pipeline) -> None:
    done = dagrl("plan", str(pipeline), "--json")
    assert done.returncode == 0, done.stderr
    assert "generator" in done.stdout


def test_it_runs(dagrl, pipeline, tmp_path) -> None:
    done = dagrl("run", str(pipeline), "--run-dir", str(tmp_path / "run"))
    assert done.returncode == 0, done.stdout + done.stderr
    (step,) = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert step["response_tokens/mean"] == 2


def test_doctor_lists_it(python) -> None:
    done = python("-c", SOFTWARE)
    assert done.stdout.startswith("ready; "), done.stderr


def test_one_that_cannot_be_imported_is_an_error_where_it_is_used(tmp_path: Path) -> None:
    info = tmp_path / "torn-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torn\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[dagrl.backends]\ntorn = torn\n")
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / "section.py").write_text("from dagrl.config.schema.engine import NoSuchThing\n")
    pipeline = write_pipeline(tmp_path, tiny_pipeline())
    command = [sys.executable, "-m", "dagrl", "validate", str(pipeline)]

    def call(*overrides: str) -> subprocess.CompletedProcess[str]:
        variables = os.environ | {"PYTHONPATH": str(tmp_path)}
        return subprocess.run([*command, *overrides], env=variables, capture_output=True, text=True, timeout=240)

    assert call().returncode == 0
    wrong = call("engines.generator.backend=torn")
    (line,) = wrong.stderr.splitlines()
    assert wrong.returncode == 2 and "engines.generator" in line
    assert "the backend `torn` cannot be imported" in line and "NoSuchThing" in line
