"""What a Ray of our own needs on a machine."""

from __future__ import annotations

import shutil
from types import SimpleNamespace

import pytest

from dagrl.workers.cluster import session


@pytest.mark.parametrize(
    ("free_gib", "told"),
    [
        (3.0, ""),
        (0.0625, "/dev/shm has 0.1 GiB free, and Ray's object store takes 2.0: it is on the disk, which is slow; "),
    ],
)
def test_shared_memory_that_is_too_small_is_told(monkeypatch: pytest.MonkeyPatch, free_gib: float, told: str) -> None:
    monkeypatch.setattr(session, "object_store_bytes", lambda: 2 * 2**30)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=int(free_gib * 2**30)))
    said = session.small_shared_memory()
    assert said.startswith(told) and bool(said) == bool(told)


def test_where_there_is_no_shared_memory_ray_says_so_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(folder: object) -> None:
        raise FileNotFoundError

    monkeypatch.setattr(shutil, "disk_usage", missing)
    assert session.small_shared_memory() == ""
