"""Workers as files write them."""

from __future__ import annotations

import pytest

from dagrl.scheduler.plan import WorkerId


@pytest.mark.parametrize("worker", [WorkerId("actor", 0), WorkerId("host", 4095), WorkerId("teacher/frozen", 3)])
def test_a_worker_is_read_as_it_was_written(worker: WorkerId) -> None:
    assert WorkerId.parse(str(worker)) == worker


@pytest.mark.parametrize("text", ["", "actor", "actor/", "actor/first", "actor/0.5"])
def test_another_text_is_no_worker(text: str) -> None:
    with pytest.raises(ValueError, match="invalid literal"):
        WorkerId.parse(text)
