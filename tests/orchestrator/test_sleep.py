"""Two engines on one group that take turns in memory: the same numbers as where each has a group to itself."""

from __future__ import annotations

import itertools
import json

import pytest

pytestmark = pytest.mark.slow
CLOCKS_US = 2000
"""Events of the driver and of its workers are taken from clocks that may differ by a little."""


@pytest.fixture(scope="module")
def taking_turns(lab, tmp_path_factory):
    """The first steps of the tiny pipeline on one slot. `test_resume` continues such a run."""
    folder = tmp_path_factory.mktemp("turns")
    pipeline = lab.tiny_pipeline()
    pipeline["groups"] = {"all": {"cpus_per_node": 1}}
    for name in ("actor", "generator"):
        pipeline["engines"][name] |= {"group": "all", "sleep": True}
    path = lab.write_pipeline(folder, pipeline)
    run = lab.start(path, folder / "run", "run.steps=4")
    assert run.wait() == 0, run.output
    return run


def test_sleeping_changes_no_number(taking_turns, unbroken, lab):
    metrics = taking_turns.metrics()
    assert [line["step"] for line in metrics] == [1, 2, 3, 4]
    assert lab.comparable(metrics) == lab.comparable(unbroken.metrics()[:4])


def test_no_engine_works_while_the_other_is_in_memory(taking_turns):
    """The timeline: offload to the weights, sync, sleep, wake, rollout, and back."""
    timeline = json.loads((taking_turns.folder / "timeline.json").read_text())
    events = [event for event in timeline if event["ph"] == "X" and event["args"]["group"] == "all"]
    events.sort(key=lambda event: event["ts"])
    for before, event in itertools.pairwise(events):
        if before["args"]["worker"] != event["args"]["worker"]:
            assert before["ts"] + before["dur"] <= event["ts"] + CLOCKS_US, (before, event)
    actor, generator = "actor/0", "generator/0"
    over = [("sleep", actor), ("wake", generator), ("sync", generator), ("sleep", actor), ("wake", generator)]
    back = [("sleep", generator), ("wake", actor)]
    for step, expected in {
        1: [*over, "rollout", *back, "old", "ref", "update"],
        2: [*over, "rollout", *back, "old", "ref", "update", "save"],
        3: [*over, "rollout", *back, "old", "ref", "update", *over, "val/rollout"],
        # The generator is awake, with these weights.
        4: ["rollout", *back, "old", "ref", "update", "save"],
    }.items():
        mine = [(event["name"], event["args"]["worker"]) for event in events if event["args"]["step"] == step]
        seen = [each if each[0] in ("sleep", "wake", "sync") else each[0] for each in mine]
        assert [name for name, _ in itertools.groupby(seen)] == expected, step


def test_the_time_of_moves_is_measured_and_memory_only_of_devices(taking_turns):
    for line in taking_turns.metrics():
        assert line["time/wake_s"] > 0
        assert line["time/sleep_s"] > 0
        assert not [name for name in line if name.startswith("memory/")]
