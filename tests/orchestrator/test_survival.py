"""Workers that are killed at random moments: the run comes to its end by itself, with the numbers of one left in peace.

The moments are drawn from a seed, another one each time, which a failure names.
"""

from __future__ import annotations

import json
import os
import random
import signal
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pyarrow.parquet as pq
import pytest

WAIT_S = 400
GENERATORS = ["generator/0", "generator/1"] * 7
OTHERS = ["actor/0", "host/0"] * 3
"""If one of these dies, the whole run continues from its last checkpoint."""
STEPS = 24
LONGEST_PEACE = 2.5
"""Between a worker's return and the next death, in steps; the first one after it takes about two."""


class Killer:
    """Kills workers of a run one after the other, each when all of them are running again."""

    def __init__(self, run: Any, seed: int, longest_peace_s: float) -> None:
        self.run, self.seed, self._longest_peace_s = run, seed, longest_peace_s
        self._random = random.Random(seed)
        self.kills = 0

    @property
    def told(self) -> str:
        """The context that a failure message needs."""
        return f"seed {self.seed}, after {self.kills} deaths:\n{self.run.output}"

    def kill_all(self, victims: Sequence[str]) -> None:
        """End each of the workers, in any order."""
        for victim in self._random.sample(victims, len(victims)):
            self._kill(victim)

    def _kill(self, worker: str) -> None:
        """Kill a worker some time after it starts; do nothing if the run has ended."""
        if not self._until_all_are_there():
            return
        time.sleep(self._random.uniform(0, self._longest_peace_s))
        try:
            os.kill(self._pid(worker), signal.SIGKILL)
        except ProcessLookupError:
            return
        self.kills += 1

    def _until_all_are_there(self) -> bool:
        deadline = time.monotonic() + WAIT_S
        while self.run.process.poll() is None:
            assert time.monotonic() < deadline, f"no restart within {WAIT_S} s, {self.told}"
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
        back = output.rfind("restarted\n") >= output.rfind("is restarted (restart")
        return under_way and back

    def _pid(self, worker: str) -> int:
        return json.loads((self.run.folder / "workers.json").read_text())[worker]["pid"]


def comparable_samples(run: Any, step: int) -> list[dict[str, Any]]:
    """Stored samples in the order of their ids, which are unique."""
    rows = pq.read_table(run.folder / "samples" / f"step_{step}.parquet").to_pylist()
    assert set(Counter(row["sample_id"] for row in rows).values()) == {1}, f"step {step}: there twice"
    return sorted(rows, key=lambda row: row["sample_id"])


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.timeout(900)
def test_a_run_outlives_twenty_deaths_at_random_moments(lab, tmp_path):
    lengths = (f"run.steps={STEPS}", "run.save_every=1")
    whole = lab.start(lab.write_pipeline(tmp_path / "whole", lab.tiny_pipeline()), tmp_path / "whole" / "run", *lengths)
    assert whole.wait() == 0, whole.output
    pipeline = lab.tiny_pipeline()
    pipeline["groups"]["rollout"] = {"cpus_per_node": 2}
    victims = [*GENERATORS, *OTHERS]
    bound = f"run.max_restarts={len(victims)}"
    run = lab.start(lab.write_pipeline(tmp_path / "hurt", pipeline), tmp_path / "hurt" / "run", *lengths, bound)

    seed = random.SystemRandom().randrange(10**6)
    step_s = statistics.median(line["time/step_s"] for line in whole.metrics())
    killer = Killer(run, seed, LONGEST_PEACE * step_s)
    killer.kill_all(victims)
    assert run.wait() == 0, killer.told
    told = killer.told
    assert killer.kills == len(victims), told
    assert "Traceback" not in run.output, told

    assert lab.comparable(run.metrics()) == lab.comparable(whole.metrics()), told
    for step in range(1, STEPS + 1):
        assert comparable_samples(run, step) == comparable_samples(whole, step), told
    # A lost generator ends no other worker.
    alone, back = (run.output.count(what) for what in ("restarted\n", "goes on from its last checkpoint ("))
    assert alone <= len(GENERATORS) and back <= len(OTHERS), told
    assert run.output.count("executors started") == back + 1, told
    # The last death may come when no worker is needed any more.
    assert run.metrics()[-1]["run/restarts"] in (len(victims) - 1, len(victims)), told
    assert run.left_behind() == [], told
