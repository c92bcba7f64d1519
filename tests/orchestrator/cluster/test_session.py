"""Requirements of a Ray that dagrl starts."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from dagrl.orchestrator.cluster import session


@pytest.mark.parametrize(
    ("free_gib", "told"),
    [
        (3.0, ""),
        (0.0625, "/dev/shm has 0.1 GiB free, and Ray's object store takes 2.0: it is on the disk, which is slow; "),
    ],
)
def test_small_shared_memory_is_reported(monkeypatch: pytest.MonkeyPatch, free_gib: float, told: str) -> None:
    monkeypatch.setattr(session, "object_store_bytes", lambda: 2 * 2**30)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=int(free_gib * 2**30)))
    said = session.small_shared_memory()
    assert said.startswith(told) and bool(said) == bool(told)


def test_ray_itself_reports_missing_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(folder: object) -> None:
        raise FileNotFoundError

    monkeypatch.setattr(shutil, "disk_usage", missing)
    assert session.small_shared_memory() == ""


def test_the_ends_of_what_workers_printed_are_kept(tmp_path: Path) -> None:
    (folder := tmp_path / "session_1" / "logs").mkdir(parents=True)
    with (folder / "worker-1.out").open("wb") as file:
        file.write(b":job_id:01\n:actor_name:Worker\nbegin\n")
        file.truncate(10 << 30)
        file.seek(0, 2)
        file.write(b"end\n")
    (folder / "worker-1.err").write_text(":job_id:01\n")
    (folder / "worker-2.err").write_text(":job_id:01\na warning\n")
    session.keep_worker_logs(tmp_path, tmp_path / "logs", "head-")
    kept = {each.name: each.read_text() for each in (tmp_path / "logs").iterdir()}
    assert kept.pop("head-worker-2.err") == "a warning\n"
    ((name, text),) = kept.items()
    assert name == "head-worker-1.out"
    assert text.startswith("begin\n") and text.endswith("end\n")
    assert len(text) < 3 << 20


def test_a_run_folder_that_only_has_logs_is_the_owner_s_alone(tmp_path: Path) -> None:
    printed = tmp_path / "session" / "session_1" / "logs" / "worker-1.out"
    printed.parent.mkdir(parents=True)
    printed.write_text("a response\n")
    session.keep_worker_logs(tmp_path / "session", tmp_path / "run" / "logs")
    assert (tmp_path / "run" / "logs" / "worker-1.out").read_text() == "a response\n"
    assert (tmp_path / "run").stat().st_mode & 0o777 == 0o700
