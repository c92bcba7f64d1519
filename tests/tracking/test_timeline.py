"""timeline.json: a valid Chrome trace at each moment of a run."""

import json
import os
from pathlib import Path

import pytest

from dagrl.scheduler.intervals import Activity
from dagrl.scheduler.plan import WorkerId
from dagrl.tracking.timeline import Timeline


def load(folder: Path) -> list[dict]:
    return json.loads((folder / "timeline.json").read_text())


def complete_events(folder: Path) -> list[dict]:
    return [event for event in load(folder) if event["ph"] == "X"]


def record(timeline: Timeline, step: int, group: str = "train", worker: str = "actor/0", name: str = "update") -> None:
    timeline.extend([Activity(name, "node", step, step + 0.5, step, None, group, WorkerId.parse(worker))])


@pytest.fixture
def timeline(tmp_path):
    timeline = Timeline()
    timeline.start(tmp_path, None)
    yield timeline
    timeline.close()


def test_it_is_valid_json_after_every_write(tmp_path, timeline):
    assert load(tmp_path) == []
    for count in range(1, 30):
        record(timeline, count, worker=f"actor/{count % 3}")
        assert len(complete_events(tmp_path)) == count


def test_an_event_has_time_name_and_worker(tmp_path, timeline):
    worker = WorkerId("host", 0)
    timeline.extend([Activity("reward", "node", 1763690000.25, 1763690001.0, 3, 1, "rollout", worker)])
    (event,) = complete_events(tmp_path)
    assert (event["name"], event["cat"]) == ("reward", "node")
    assert (event["ts"], event["dur"]) == (1763690000250000, 750000)
    assert event["args"] == {"step": 3, "shard": 1, "group": "rollout", "worker": "host/0"}


def test_groups_and_workers_are_named_once_and_distinctly(tmp_path, timeline):
    for step in (1, 2):
        record(timeline, step, "train", "actor/0")
        record(timeline, step, "train", "actor/1")
        record(timeline, step, "rollout", "actor/0")
    names = {
        (event["name"], event["pid"], event["tid"] if event["name"] == "thread_name" else None): event["args"]["name"]
        for event in load(tmp_path)
        if event["ph"] == "M"
    }
    assert len([event for event in load(tmp_path) if event["ph"] == "M"]) == len(names) == 5
    for event in complete_events(tmp_path):
        assert names["process_name", event["pid"], None] == event["args"]["group"]
        assert names["thread_name", event["pid"], event["tid"]] == event["args"]["worker"]


@pytest.mark.parametrize(("resumed_step", "kept"), [(None, []), (2, [1, 2])])
def test_resuming_cuts_later_steps_and_continues(tmp_path, resumed_step, kept):
    first = Timeline()
    first.start(tmp_path, None)
    for step in (1, 2, 3, 4):
        record(first, step, group=f"group{step % 2}")
    first.close()
    second = Timeline()
    second.start(tmp_path, resumed_step)
    record(second, 5, group="group0")
    second.close()
    assert [event["args"]["step"] for event in complete_events(tmp_path)] == [*kept, 5]
    pids = {event["args"]["group"]: event["pid"] for event in complete_events(tmp_path)}
    assert len(set(pids.values())) == len(pids)


@pytest.mark.parametrize("lost", [1, 3, 20, 10_000])
def test_a_file_that_lost_its_end_can_be_gone_on_with(tmp_path, timeline, lost):
    for step in (1, 2, 3):
        record(timeline, step)
    path = tmp_path / "timeline.json"
    path.write_bytes(path.read_bytes()[:-lost])
    again = Timeline()
    again.start(tmp_path, 3)
    again.close()
    survivors = [event["args"]["step"] for event in complete_events(tmp_path)]
    assert survivors == [1, 2, 3][: len(survivors)]
    assert len(survivors) >= (2 if lost <= 20 else 0)


@pytest.mark.parametrize("args", [None, {"step": 1}, {"step": "1", "group": "g", "worker": "w"}])
def test_events_that_are_no_runs_are_left_out_when_it_continues(tmp_path, timeline, args):
    record(timeline, 1)
    path = tmp_path / "timeline.json"
    foreign = {"name": "theirs", "ph": "X", "ts": 0, "dur": 1} | ({} if args is None else {"args": args})
    path.write_text("[\n" + json.dumps(foreign) + ",\n" + path.read_text().removeprefix("[\n"))
    again = Timeline()
    again.start(tmp_path, 3)
    again.close()
    assert [event["args"]["step"] for event in complete_events(tmp_path)] == [1]


def test_a_full_disk_is_an_error_and_leaves_valid_json(tmp_path, timeline, monkeypatch):
    record(timeline, 1)
    pwrite, calls = os.pwrite, []

    def half(file: int, data: bytes, offset: int) -> int:
        # What the kernel does when the disk fills up in the middle of a write.
        calls.append(data)
        return pwrite(file, data[:20] if len(calls) == 1 else data, offset)

    monkeypatch.setattr(os, "pwrite", half)
    with pytest.raises(OSError, match=r"cannot write .*timeline\.json: No space left on device"):
        record(timeline, 2)
    assert [event["args"]["step"] for event in complete_events(tmp_path)] == [1]
    record(timeline, 3)
    assert [event["args"]["step"] for event in complete_events(tmp_path)] == [1, 3]


def test_a_file_that_was_removed_is_an_error(tmp_path, timeline):
    record(timeline, 1)
    (tmp_path / "timeline.json").unlink()
    with pytest.raises(OSError, match=r"cannot write .*timeline\.json: it was removed during the run"):
        record(timeline, 2)


@pytest.mark.parametrize("count", [0, 1, 64, 200])
def test_several_at_once_are_written_as_one_after_the_other(tmp_path, timeline, count):
    other = Timeline()
    other.start(tmp_path / "other", None)
    activities = [
        Activity("reward", "node", at, at + 1, 2, at, "host", WorkerId("host", at % 3)) for at in range(count)
    ]
    timeline.extend(iter(activities))
    for activity in activities:
        other.extend([activity])
    other.close()
    assert load(tmp_path) == load(tmp_path / "other")
    assert [event["args"]["shard"] for event in complete_events(tmp_path)] == list(range(count))
