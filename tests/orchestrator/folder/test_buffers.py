"""A buffer whose groups cannot return is refused before anything starts."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
from local_run import LocalRun, without_ray  # noqa: F401

from dagrl.orchestrator.folder.buffers import check_buffers
from dagrl.orchestrator.folder.checkpoint import Checkpoints
from dagrl.orchestrator.folder.run_folder import RunFolder
from dagrl.orchestrator.run import run_pipeline
from dagrl.validation.prepare import prepare
from dagrl.workers.errors import RefusedFolderError

pytestmark = pytest.mark.usefixtures("without_ray")
Edit = Callable[[dict[str, Any]], object]


@pytest.fixture
def declared(lab: Any, tmp_path: Path) -> dict[str, Any]:
    """A pipeline, whose run has stopped after two steps."""
    declared = lab.tiny_pipeline()
    declared["nodes"]["reward"]["fn"] = "rewards:even"
    declared["nodes"]["rollout"]["sampling"] = {"max_new_tokens": 4}
    declared["nodes"]["buffer"] = {"op": "buffer", "groups_per_step": 2, "keep": "all"}
    declared["data"]["val"] = None
    declared["run"] |= {"steps": 2, "validate_every": None}
    prepared = prepare(lab.write_pipeline(tmp_path, declared))
    assert LocalRun(prepared, tmp_path / "run", Random(0), None).to_the_end()
    declared["run"]["steps"] = 3
    return declared


def two_rewards(declared: dict[str, Any]) -> None:
    declared["nodes"]["polite"] = {"op": "reward", "fn": "rewards:even", "write": "polite"}
    declared["nodes"]["advantage"] = {"op": "advantage", "estimator": "gdpo", "rewards": {"reward": 1, "polite": 1}}


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda declared: declared["model"]["init"].update(hidden_size=64), "is of another model than the run's; "),
        (
            lambda declared: declared["model"]["tokenizer"].update(alphabet="9876543210+="),
            "is of another tokenizer than the run's; ",
        ),
        (
            lambda declared: declared["nodes"]["rollout"].update(n=2),
            "has a group of 4 rows, and groups of this run have 2; keep the rollout's `n`, or ",
        ),
        (two_rewards, "lack the column `polite`, which a node reads now; "),
    ],
)
def test_groups_that_cannot_return_are_refused(
    lab: Any, tmp_path: Path, declared: dict[str, Any], edit: Edit, message: str
) -> None:
    edited = copy.deepcopy(declared)
    checkpoints = Checkpoints(tmp_path / "run", "all")
    folder = RunFolder(tmp_path / "run", checkpoints, checkpoints.find().state, None)
    check_buffers(prepare(lab.write_pipeline(tmp_path, edited)), folder)
    edit(edited)
    prepared = prepare(lab.write_pipeline(tmp_path, edited))
    with pytest.raises(RefusedFolderError) as error:
        check_buffers(prepared, folder)
    assert message in str(error.value)
    assert str(tmp_path / "run" / "buffer" / "buffer") in str(error.value)
    # Without a checkpoint the run begins with an empty buffer.
    check_buffers(prepared, RunFolder(tmp_path / "run", checkpoints, None, None))


def test_a_run_refuses_before_it_starts_ray(lab: Any, tmp_path: Path, declared: dict[str, Any]) -> None:
    two_rewards(declared)
    with pytest.raises(RefusedFolderError, match="lack the column `polite`"):
        run_pipeline(prepare(lab.write_pipeline(tmp_path, declared)), tmp_path / "run")
    assert not (tmp_path / "run" / "logs").exists()
