"""wandb without a key or a network: a real offline run, and failures that the training survives."""

import json
import os
import signal
import sys
from pathlib import Path

import pytest

from dagrl.config.schema import TrackerSpec
from dagrl.tracking.base import SampleTable
from dagrl.tracking.wandb import Wandb

CONFIG = {"name": "tiny", "data": {"prompts_per_step": 8}}


@pytest.fixture(autouse=True)
def no_account(monkeypatch):
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")


def children() -> dict[int, str]:
    """Processes whose parent is this one, by id, zombies left out."""
    found = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, fields = status.read_text().split("(", 1)[1].rsplit(") ", 1)
        except FileNotFoundError:
            continue
        state, parent = fields.split()[:2]
        if int(parent) == os.getpid() and state != "Z":
            found[int(status.parent.name)] = name
    return found


def service() -> list[int]:
    return [pid for pid, name in children().items() if name.startswith("wandb")]


def offline_files(run_dir: Path) -> list[Path]:
    return sorted(run_dir.glob("wandb/offline-run-*/*.wandb"))


def test_without_a_key_it_logs_offline_under_the_run_folder_and_leaves_no_process(tmp_path):
    notes = []
    tracker = Wandb(
        "tiny", notes.append, TrackerSpec(tracker="wandb", project="long sums", entity="our team", group="first try")
    )
    tracker.start(tmp_path, CONFIG, None)
    assert service(), "the test must see wandb's process, to see it go"
    tracker.log(1, {"reward/mean": 0.123456789})
    tracker.close(ok=True)
    assert service() == []
    (file,) = offline_files(tmp_path)
    content = file.read_bytes()
    assert b"reward/mean" in content
    assert all(name in content for name in (b"long sums", b"our team", b"first try"))
    assert b"0.123456789" in content
    assert b"prompts_per_step" in content
    assert [note.split(";")[0] for note in notes] == ["wandb: offline"]


def test_samples_are_a_table(tmp_path):
    tracker = Wandb("tiny", lambda note: None, TrackerSpec(tracker="wandb"))
    tracker.start(tmp_path, CONFIG, None)
    tracker.samples(1, SampleTable(("prompt", "reward"), (("1+1=", 1.0),)))
    tracker.close(ok=True)
    (table,) = tmp_path.glob("wandb/offline-run-*/files/media/table/val/samples*.table.json")
    assert json.loads(table.read_text())["data"] == [["1+1=", 1.0]]


def test_a_resumed_run_is_the_same_run(tmp_path):
    for resumed_step in (None, 1):
        tracker = Wandb("tiny", lambda note: None, TrackerSpec(tracker="wandb"))
        tracker.start(tmp_path, CONFIG, resumed_step)
        tracker.log(2, {"reward/mean": 0.5})
        tracker.close(ok=True)
    run_id = (tmp_path / "wandb" / "run_id").read_text().strip()
    # Two runs begun in the same second share their folder: what counts is the id in the name.
    assert {file.name for file in offline_files(tmp_path)} == {f"run-{run_id}.wandb"}


def test_wandb_breaking_in_mid_run_is_one_note(tmp_path):
    notes = []
    tracker = Wandb("tiny", notes.append, TrackerSpec(tracker="wandb"))
    tracker.start(tmp_path, CONFIG, None)
    (pid,) = service()
    os.kill(pid, signal.SIGKILL)
    for step in range(1, 200):
        tracker.log(step, {"reward/mean": 0.5})
    tracker.close(ok=True)
    assert len([note for note in notes if note.startswith("wandb stopped: ")]) == 1
    assert service() == []


def test_a_server_that_is_not_there_means_offline(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setattr("dagrl.tracking.wandb.START_TIMEOUT_S", 1.0)
    notes = []
    tracker = Wandb("tiny", notes.append, TrackerSpec(tracker="wandb"))
    tracker.start(tmp_path, CONFIG, None)
    tracker.log(1, {"reward/mean": 0.5})
    tracker.close(ok=True)
    assert len(offline_files(tmp_path)) == 1
    assert notes[0].endswith("; logging offline")
    assert len(notes) == 2
    assert service() == []


def test_closing_a_tracker_that_never_started_is_harmless():
    notes = []
    Wandb("tiny", notes.append, TrackerSpec(tracker="wandb")).close(ok=False)
    assert notes == []


def test_an_error_that_is_not_wandbs_is_not_swallowed(tmp_path):
    tracker = Wandb("tiny", lambda note: None, TrackerSpec(tracker="wandb"))
    with pytest.raises(TypeError):
        tracker.start(tmp_path, None, None)
    tracker.close(ok=False)
    assert service() == []


def test_secrets_among_the_arguments_of_the_command_are_not_stored(tmp_path, monkeypatch):
    given = ["dagrl", "run", "p.yaml", "nodes.rollout.agent.env.A=xyzzy"]
    monkeypatch.setattr(sys, "argv", given)
    tracker = Wandb("tiny", lambda note: None, TrackerSpec(tracker="wandb"))
    tracker.start(tmp_path, CONFIG, None)
    assert sys.argv is given
    tracker.close(ok=True)
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and b"xyzzy" in path.read_bytes()]
