"""Thousands of steps of the demo: no process of a run grows, Ray's own included."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from process_sizes import ProcessSizes, file_bytes, table

STEPS = 3000
SETTLED = 500
"""From this step on every process keeps its size."""
SHARE = 0.05
_PAUSE_S = 2.0
_LONGEST_STEP_S = 3.0
DEMO = Path(__file__).parents[3] / "dag_templates" / "tiny_grpo.yaml"


@pytest.mark.soak
@pytest.mark.timeout(STEPS * _LONGEST_STEP_S)
def test_no_process_grows(lab, tmp_path):
    run = lab.start(DEMO, tmp_path / "run", f"run.steps={STEPS}")
    metrics, sizes = run.folder / "metrics.jsonl", ProcessSizes()
    while run.process.poll() is None:
        step = metrics.read_bytes().count(b"\n") if metrics.is_file() else 0
        if step < STEPS:  # then workers free what they hold
            sizes.add(step, "files", "Ray's files", file_bytes(run.temporary))
            sizes.sample(step, run.process.pid, run.folder / "workers.json")
        time.sleep(_PAUSE_S)
    assert run.wait() == 0, run.output
    changes = sizes.changes(SETTLED)
    print(table(changes, SETTLED))
    assert {"gcs_server", "raylet", "driver", "actor/0", "generator/0", "host/0"} <= {
        each.name.partition(" ")[0] for each in changes
    }
    assert not (grown := [each for each in changes if each.growth > SHARE]), table(grown, SETTLED)
