"""Explorers and a trainer as processes of their own, which meet in a folder."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from dagrl.orchestrator.folder.experience import ExperienceFolder

pytestmark = pytest.mark.slow

EXPLORE, TRAIN = ("--only", "rollout,reward"), ("--only", "advantage,update")


def explorer_of(run: Any, name: str = "1of1") -> Any:
    """The run, with the folder that an explorer has."""
    run.folder = run.folder.with_name(f"{run.folder.name}-explorer-{name}")
    return run


def explore(lab: Any, file: Path, folder: Path, experience: Path, *overrides: str) -> Any:
    return explorer_of(lab.start(file, folder, *EXPLORE, "--experience", str(experience), *overrides))


@pytest.fixture(scope="module")
def killed(lab: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A trainer whose explorer, and itself, were killed and started again; with the folder of experience."""
    folder = tmp_path_factory.mktemp("apart")
    file = lab.write_pipeline(folder, lab.tiny_pipeline())
    experience = folder / "trainer" / "experience"
    explorer = explore(lab, file, folder / "explorer", experience)
    trainer = lab.start(file, folder / "trainer", *TRAIN)
    explorer.wait_for_step(2)
    explorer.kill()
    explorer = explore(lab, file, folder / "explorer", experience)
    # Its last checkpoint is that of step 2 or 4, and the weights of later steps were published.
    trainer.wait_for_step(3)
    trainer.kill()
    again = lab.start(file, folder / "trainer", *TRAIN)
    assert again.wait() == 0, again.output
    assert explorer.wait() == 0, explorer.output
    assert "Traceback" not in explorer.output + again.output
    return again


def test_killed_parts_are_trained_on_each_batch_once(lab, killed, unbroken):
    lines = [
        {name: line[name] for name in line if name != "experience/wait_s"} for line in lab.comparable(killed.metrics())
    ]
    whole = [line for line in lab.comparable(unbroken.metrics()) if line["step"]]
    assert lines == [{name: each[name] for name in line} for line, each in zip(lines, whole, strict=True)]
    assert {"reward/mean", "grad_norm", "staleness/max", "policy_version", "loss/policy"} <= lines[5].keys()
    state = json.loads((killed.folder / "checkpoints" / "step_6" / "state.json").read_text())
    assert state["experience"] == {"1of1": 6}
    batches = sorted(path.name for path in (killed.folder / "experience" / "batches").glob("*"))
    assert batches == [f"1of1-{number:06d}.parquet" for number in range(1, 7)]
    rows = pq.read_table(killed.folder / "experience" / "batches" / batches[2]).to_pylist()
    assert len(rows) == 8 * 4 and {row["policy_version"] for row in rows} == {2}
    assert len({row["prompt_id"] for row in rows}) == 8


def test_experience_trains_another_run_later_which_stops_while_it_waits(lab, killed, tmp_path):
    experience = tmp_path / "experience"
    shutil.copytree(killed.folder / "experience", experience)
    explorers = ExperienceFolder(experience)
    explorers.note_explorer("1of1", tmp_path, ended=False)
    file = lab.write_pipeline(tmp_path, lab.tiny_pipeline())
    options = ("--experience", str(experience), "schedule.weights_every=0", "run.steps=9", "run.save_every=100")
    run = lab.start(file, tmp_path / "run", *TRAIN, *options)
    run.wait_for_step(6)
    run.process.send_signal(signal.SIGINT)
    assert run.wait() == 0, run.output
    assert "stopped after step 6" in run.output
    # It was committed before it was known to be the last.
    state = json.loads((run.folder / "checkpoints" / "step_6" / "state.json").read_text())
    assert state["experience"] == {"1of1": 6}
    lines = run.metrics()
    assert [line["reward/mean"] for line in lines] == [line["reward/mean"] for line in killed.metrics()]
    assert [line["staleness/max"] for line in lines] == [0] * 6

    explorers.note_explorer("1of1", tmp_path, ended=True)
    run = lab.start(file, tmp_path / "run", *TRAIN, *options)
    assert run.wait() == 0, run.output
    assert "finished step 6" in run.output
    assert not (run.folder / "experience").exists()
