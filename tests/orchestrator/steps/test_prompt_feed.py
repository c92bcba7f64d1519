"""The feed of prompts, with a user's sampler."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from dagrl.orchestrator.folder.checkpoint import RunState
from dagrl.orchestrator.groups import task_group
from dagrl.orchestrator.steps.prompt_feed import PromptFeed
from dagrl.orchestrator.steps.record import StepRecord
from dagrl.scheduler.commands import Run
from dagrl.validation.prepare import prepare
from dagrl.workers.errors import RunError

DOUBLES = """
class Doubles:
    def __init__(self, sources, seed, after):
        self.names, self.after = list(sources), after
    def take(self, count, step):
        return [(self.names[0], 0 if step > self.after else row) for row in range(count)]
    def state(self):
        return None
    def load(self, state):
        pass
"""


def test_a_sampler_that_fails_ends_the_run_with_its_name(lab, tmp_path: Path) -> None:
    pipeline = lab.tiny_pipeline()
    pipeline["data"] |= {"train": {"many": "train.parquet"}, "order": {"sampler": "mine:Doubles", "args": {"after": 2}}}
    (tmp_path / "mine.py").write_text(DOUBLES)
    feed = PromptFeed(prepare(lab.write_pipeline(tmp_path, pipeline)), RunState(0, ""), print)

    def take(step: int) -> list[int]:
        return asyncio.run(feed.take(Run(step, "prompts", ()), 4, StepRecord(step)))

    assert len(set(take(1))) == len(set(take(2))) == 4
    with pytest.raises(RunError) as caught:
        take(3)
    assert caught.value.cause == "mine:Doubles.take returns row 0 of many twice for step 3; return different prompts"
    assert caught.value.node == "prompts (step 3)"


HANGS = """
import threading
class Hangs:
    def __init__(self, sources, seed, method):
        self.hangs = method
    def _wait(self, method):
        if method == self.hangs:
            threading.Event().wait()
    def take(self, count, step):
        if step > 1:
            self._wait("take")
        return list(range(count))
    def observe(self, rows):
        self._wait("observe")
    def state(self):
        return None
    def load(self, state):
        pass
"""


@pytest.mark.parametrize("method", ["take", "observe"])
def test_a_sampler_that_hangs_is_noted_and_leaves_the_loop_free(lab, tmp_path: Path, monkeypatch, method: str) -> None:
    monkeypatch.setattr(task_group, "_QUIET_S", 0.01)
    pipeline = lab.tiny_pipeline()
    pipeline["data"]["order"] = {"sampler": "mine:Hangs", "args": {"method": method}}
    pipeline["run"]["node_timeout_s"] = 0.03
    (tmp_path / "mine.py").write_text(HANGS)
    notes = list[str]()
    feed = PromptFeed(prepare(lab.write_pipeline(tmp_path, pipeline)), RunState(0, ""), notes.append)

    async def take(step: int) -> list[int]:
        return await feed.take(Run(step, "prompts", ()), 4, StepRecord(step))

    async def both_steps() -> None:
        await take(1)
        # A signal handler of the loop runs, as this does, while the call waits.
        await asyncio.gather(take(2), asyncio.sleep(0))

    with pytest.raises(RunError) as caught:
        asyncio.run(both_steps())
    assert notes == [f"prompts (step 2): mine:Hangs.{method} has not returned for {s} s" for s in ("0.01", "0.02")]
    assert caught.value.cause == f"mine:Hangs.{method} has not returned for 0.03 s"
    assert (caught.value.node, caught.value.hint[:24]) == ("prompts (step 2)", "raise run.node_timeout_s")
