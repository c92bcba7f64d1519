"""The feed of prompts, with a user's sampler."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from dagrl.orchestrator.folder.checkpoint import RunState
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
    feed = PromptFeed(prepare(lab.write_pipeline(tmp_path, pipeline)), RunState(0, ""))

    def take(step: int) -> list[int]:
        return asyncio.run(feed.take(Run(step, "prompts", ()), 4, StepRecord(step)))

    assert len(set(take(1))) == len(set(take(2))) == 4
    with pytest.raises(RunError) as caught:
        take(3)
    assert caught.value.cause == "mine:Doubles.take returns row 0 of many twice for step 3; return different prompts"
    assert caught.value.node == "prompts (step 3)"
