"""One checkpoint is moved into place after the other, however steps are committed."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dagrl.orchestrator.checkpoint_writer import CheckpointWriter

STEPS = 4


class Slow:
    """Checkpoints whose disk is slow: two that are moved at once would meet."""

    def __init__(self) -> None:
        self.lock, self.finished = threading.Lock(), []

    def begin(self, step: int) -> Path:
        return Path(f".step_{step}")

    def finish(self, folder: Path, state: Any) -> None:
        assert self.lock.acquire(blocking=False), "another one is being moved"
        time.sleep(0.02)
        self.finished.append(state.step)
        self.lock.release()


@pytest.mark.parametrize("in_background", [True, False])
def test_steps_that_are_committed_side_by_side_are_saved_one_by_one(in_background: bool) -> None:
    """A run without training, in which no step waits for another one's save."""
    checkpoints, plan = Slow(), SimpleNamespace(executors={})

    async def commit_all() -> None:
        writer = CheckpointWriter(
            None,  # type: ignore[arg-type]
            plan,  # type: ignore[arg-type]
            checkpoints,  # type: ignore[arg-type]
            in_background=in_background,
            timeout_s=10.0,
            draw=lambda *_: None,
            report=lambda _: None,
        )
        states: list[Any] = [SimpleNamespace(step=step) for step in range(1, STEPS + 1)]
        await asyncio.gather(*(writer.finish(state) for state in states))
        await writer.join()

    asyncio.run(commit_all())
    assert checkpoints.finished == [*range(1, STEPS + 1)]
