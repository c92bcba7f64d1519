"""SwanLab without a key or a network: real offline runs, and failures that the training survives."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from dagrl.config.schema import TrackerSpec
from dagrl.tracking.background_tracker import BackgroundTracker
from dagrl.tracking.base import SampleTable
from dagrl.tracking.swanlab import SwanLab, _unprobed

pytest.importorskip("swanlab")
CONFIG = {"name": "tiny", "data": {"prompts_per_step": 8}}
TABLE = SampleTable(("prompt", "reward"), (("1+1=", 1.0),))


@pytest.fixture(autouse=True)
def no_account(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in os.environ if name.startswith("SWANLAB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("SWANLAB_ROOT", str(tmp_path / "home"))


def track(run_dir: Path, steps: list[int], resumed_step: int | None = None) -> list[str]:
    notes: list[str] = []
    named = SwanLab(
        "tiny", notes.append, TrackerSpec(tracker="swanlab", project="long_sums", entity="our_team", group="first_try")
    )
    tracker = BackgroundTracker("swanlab", named, notes.append)
    tracker.start(run_dir, CONFIG, resumed_step)
    for step in steps:
        tracker.log(step, {"val/aime/mean@4": 0.123456789, "kl/ref": float("nan")})
        tracker.samples(step, TABLE)
    tracker.close(ok=True)
    # On a busy machine the tracker says that it waits.
    return [note for note in notes if note.startswith("swanlab: ")]


def test_without_a_key_it_logs_offline_under_the_run_folder(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    handler, hook = signal.getsignal(signal.SIGINT), sys.excepthook
    (note,) = track(tmp_path, [0, 1])
    (folder,) = (tmp_path / "swanlab").glob("run-*")
    assert note == f"swanlab: offline; upload with: swanlab sync {folder}"
    (record,) = folder.glob("*.swanlab")
    assert all(name in record.read_bytes() for name in (b"val/aime/mean@4", b"long_sums", b"our_team", b"first_try"))
    assert "prompts_per_step" in (folder / "files" / "config.yaml").read_text()
    tables = [file.read_text() for file in (folder / "media").rglob("*.json")]
    assert tables
    assert all("1+1=" in table for table in tables)
    assert (signal.getsignal(signal.SIGINT), sys.excepthook) == (handler, hook), "Ctrl-C is the run's own affair"
    captured = capfd.readouterr()
    assert captured.out + captured.err == "", "its lines would tear the table on the console"


def test_secrets_of_the_command_and_of_git_are_not_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    subprocess.run(["git", "init", "-q", tmp_path / "project"], check=True)
    monkeypatch.chdir(tmp_path / "project")
    subprocess.run(["git", "remote", "add", "origin", "https://me:xyzzy@github.com/me/project"], check=True)
    monkeypatch.setattr(sys, "argv", ["dagrl", "run", "p.yaml", "nodes.rollout.agent.env.A=xyzzy"])
    assert _unprobed() == {"runtime": False, "git": False}
    track(tmp_path, [0])
    stored = [path for path in (tmp_path / "swanlab").rglob("*") if path.is_file()]
    assert stored and not [path for path in stored if b"xyzzy" in path.read_bytes()]
    monkeypatch.setattr(sys, "argv", ["dagrl", "run", "p.yaml"])
    subprocess.run(["git", "remote", "set-url", "origin", "https://github.com/me/project"], check=True)
    assert _unprobed() == {}


def test_a_resumed_run_is_the_same_run(tmp_path: Path) -> None:
    track(tmp_path, [1])
    track(tmp_path, [2], resumed_step=1)
    run_id = (tmp_path / "swanlab" / "run_id").read_text().strip()
    assert {file.name for file in tmp_path.glob("swanlab/run-*/*.swanlab")} == {f"run-{run_id}.swanlab"}


class Closed(BaseHTTPRequestHandler):
    """A server that lets nobody in."""

    def _refuse(self) -> None:
        self.send_response(401)
        self.end_headers()

    do_GET = do_POST = _refuse  # noqa: N815

    def log_message(self, *args: object) -> None:
        """Say nothing."""


def test_without_access_to_the_server_it_logs_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Closed) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("SWANLAB_API_KEY", "0" * 21)
        monkeypatch.setenv("SWANLAB_API_HOST", f"http://127.0.0.1:{server.server_port}")
        first, *_, second = track(tmp_path, [1])
        server.shutdown()
    assert first.startswith("swanlab: ")
    assert first.endswith("; logging offline")
    assert second.startswith("swanlab: offline; upload with: swanlab sync ")
    folders = sorted((tmp_path / "swanlab").glob("run-*"))
    assert second.endswith(str(folders[-1]))
