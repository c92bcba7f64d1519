"""Workers that are killed at random moments: the run comes to its end by itself, with the numbers of one left in peace.

The moments are drawn from a seed, which a failure names.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pyarrow.parquet as pq
import pytest

WAIT_S = 400
KEEPER = "ray::Keeper"
"""Of what generators have handed in; no file tells where it is."""
LONGEST_PEACE_S = 1.0
"""Between a worker's return and the next death."""


class Killer:
    """Ends workers of a run, one after the other, each when all of them are there again."""

    def __init__(self, run: Any, seed: int) -> None:
        self.run, self._random = run, random.Random(seed)
        self.kills = self.lives = 0
        self._dead = -1

    def kill(self, worker: str) -> None:
        """End a worker some time after it is there; nothing where the run has ended."""
        if not self._until_all_are_there():
            return
        time.sleep(self._random.uniform(0, LONGEST_PEACE_S))
        self._dead = self._pid(worker)
        try:
            os.kill(self._dead, signal.SIGKILL)
        except ProcessLookupError:
            return
        self.kills += 1

    def _until_all_are_there(self) -> bool:
        deadline = time.monotonic() + WAIT_S
        while self.run.process.poll() is None:
            assert time.monotonic() < deadline, f"no restart within {WAIT_S} s:\n{self.run.output}"
            # A death is noticed when the worker is wanted again.
            if self._noticed() == self.kills and self._is_training():
                return True
            time.sleep(0.02)
        return False

    def _noticed(self) -> int:
        return self.run.output.count("(restart ")

    def _is_training(self) -> bool:
        output = self.run.output
        under_way = output.rfind("executors started") > output.rfind("goes on from its last checkpoint (")
        back = output.rfind("started again\n") >= output.rfind("is started again (restart")
        return under_way and back

    def _pid(self, worker: str) -> int:
        if worker == KEEPER:
            return self._keeper()
        return json.loads((self.run.folder / "workers.json").read_text())[worker]["pid"]

    def _keeper(self) -> int:
        for process in psutil.Process(self.run.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.name().startswith(KEEPER):
                    return process.pid
        raise AssertionError(f"no {KEEPER} is there:\n{self.run.output}")


def survive(lab: Any, folder: Path, victims: Sequence[str], seed: int, *overrides: str) -> Any:
    """The tiny pipeline with two generators, while the `victims` are killed."""
    pipeline = lab.tiny_pipeline()
    pipeline["groups"]["rollout"] = {"cpus_per_node": 2}
    run = lab.start(
        lab.write_pipeline(folder, pipeline), folder / "run", f"run.max_restarts={len(victims)}", *overrides
    )
    killer = Killer(run, seed)
    for victim in victims:
        killer.kill(victim)
    assert run.wait() == 0, f"seed {seed}:\n{run.output}"
    assert killer.kills == len(victims), f"seed {seed}: over after {killer.kills} deaths:\n{run.output}"
    assert "Traceback" not in run.output
    return run


def assert_same(run: Any, whole: Any, lab: Any) -> None:
    """The metrics of a run that nobody was killed in, and its samples: each once, by its id."""
    assert lab.comparable(run.metrics()) == lab.comparable(whole.metrics())
    for line in whole.metrics():
        mine, theirs = (
            pq.read_table(each.folder / "samples" / f"step_{line['step']}.parquet").to_pylist() for each in (run, whole)
        )
        assert set(Counter(row["sample_id"] for row in mine).values()) == {1}, f"step {line['step']}: there twice"
        assert sorted(mine, key=by_id) == sorted(theirs, key=by_id), f"step {line['step']}"


def by_id(row: dict[str, Any]) -> int:
    return row["sample_id"]


@pytest.mark.slow
def test_one_of_each_kind_is_killed(lab, unbroken, tmp_path):
    run = survive(lab, tmp_path, ["generator/1", "actor/0", "host/0"], 1)
    assert_same(run, unbroken, lab)
    assert [line["run/restarts"] for line in run.metrics()][-1] in (2, 3)
    # A lost generator alone takes nobody with it.
    assert run.output.count("executors started") == run.output.count("goes on from its last checkpoint (") + 1
    assert run.output.count("generator/1 started again") == 1
    assert run.left_behind() == []


@pytest.mark.soak
@pytest.mark.timeout(3000)
def test_twenty_are_killed(lab, tmp_path):
    steps = ("run.steps=60", "run.save_every=1")
    victims = [*["generator/0", "generator/1"] * 5, *["actor/0", "host/0"] * 4, KEEPER, KEEPER]
    seed = 7
    random.Random(seed).shuffle(victims)
    run = survive(lab, tmp_path / "hurt", victims, seed, *steps)
    whole = lab.start(lab.write_pipeline(tmp_path / "whole", lab.tiny_pipeline()), tmp_path / "whole" / "run", *steps)
    assert whole.wait() == 0, whole.output
    assert_same(run, whole, lab)
    assert run.left_behind() == []
