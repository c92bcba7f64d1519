"""A recorder whose worker cannot write: the run continues."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dagrl.config.loading.loader import load_pipeline
from dagrl.config.schema.alarms import parse_condition
from dagrl.data.batch import Batch, Column
from dagrl.data.column_store import ColumnStore
from dagrl.graph.inference import build_graph
from dagrl.orchestrator.records.files import Records
from dagrl.orchestrator.records.recorder import Recorder, recorded_tasks
from dagrl.orchestrator.steps.batch_index import BatchIndex
from dagrl.scheduler.commands import Run
from dagrl.scheduler.placement import make_plan
from dagrl.scheduler.plan import HOST, WorkerId
from dagrl.tracking.alarms import Alarm
from dagrl.workers.errors import RunError
from dagrl.workers.messages import Block, ColumnsToStore

TEMPLATE = Path(__file__).parents[3] / "dag_templates" / "tiny_ppo.yaml"
RUN = Run(1, "reward", (0,))


@pytest.fixture(autouse=True)
def nothing_to_wait_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dagrl.orchestrator.records.recorder.ray.wait", lambda *_, **__: None)


class Ref:
    """An object of Ray's store."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch

    def binary(self) -> bytes:
        return str(id(self)).encode()


class Host:
    """A CPU worker."""

    def __init__(self, error: RunError | None) -> None:
        self.error, self.calls = error, 0

    async def call(self, what: str, method: Any, folder: Path, wanted: list[ColumnsToStore]) -> Any:
        self.calls += 1
        if self.error is not None:
            raise self.error
        return [ColumnStore(folder).put_block(each.ref.batch, each.names) for each in wanted]


class Recorded:
    """A recorder of rewards, and what it notes."""

    def __init__(self, folder: Path, error: RunError | None = None, record: str = "[reward]") -> None:
        loaded = load_pipeline(TEMPLATE, [f"run.record={record}"])
        self.plan = make_plan(loaded.pipeline, build_graph(loaded.pipeline))
        self.host, self.notes, self.records = Host(error), [], Records(folder)
        prepared = SimpleNamespace(loaded=loaded, plan=self.plan)
        groups = {HOST: SimpleNamespace(handles=[self.host])}
        run_folder = SimpleNamespace(path=folder, start=SimpleNamespace(step=0))
        self.recorder = Recorder(prepared, groups, run_folder, self.notes.append)  # type: ignore[arg-type]

    async def step(self, *, fails: bool = False, alarms: Sequence[Alarm] = ()) -> None:
        task, rows = self.plan.task("reward"), np.arange(4)
        batch = BatchIndex.recorded(2, 2, {0: rows}, np.ones(4, dtype=np.int64))
        for producer in task.needs:
            names = [theirs for other, theirs in task.inputs.values() if other == producer]
            columns = {name: Column(np.arange(4.0)) for name in names}
            batch.promise(producer, rows, Ref(Batch(rows, columns)))  # type: ignore[arg-type]
        recording = self.recorder.begin(RUN, task, self.plan.executors[task.executor], batch)
        if fails:
            await self.recorder.drain()
            return
        ref = Ref(Batch(rows, {"reward": Column(np.ones(4))}))
        self.recorder.end(recording, [(WorkerId("host", 0), Block(rows, ref, None, 0.0, 1.0))])
        await self.recorder.commit(1, alarms)
        self.recorder.close()


def test_inputs_and_outputs_are_written_when_a_step_is_committed(tmp_path: Path) -> None:
    recorded = Recorded(tmp_path)
    asyncio.run(recorded.step())
    (run,) = recorded.records.read(1, "reward").runs
    assert run.outputs is not None and run.outputs.blocks[0].worker == "host/0"
    assert run.inputs.rows[0].rows == [0, 1, 2, 3]
    assert recorded.notes == []


def test_the_inputs_of_a_node_that_fails_are_written(tmp_path: Path) -> None:
    recorded = Recorded(tmp_path)
    asyncio.run(recorded.step(fails=True))
    (run,) = recorded.records.read(1, "reward").runs
    assert run.outputs is None and all(run.inputs.sources.values())


def test_a_full_disk_is_reported_once_and_ends_only_the_recording(tmp_path: Path) -> None:
    recorded = Recorded(tmp_path, RunError("[Errno 28] No space left on device"))
    for _ in range(3):
        asyncio.run(recorded.step())
    (note,) = recorded.notes
    assert note.startswith("recording has stopped, and the run goes on without it: [Errno 28]")
    assert recorded.host.calls == 1 and recorded.records.steps() == []


def test_records_of_steps_that_run_again_are_removed(tmp_path: Path) -> None:
    asyncio.run(Recorded(tmp_path).step())
    records = Records(tmp_path)
    records.state(3).mkdir(parents=True)
    assert (records.steps(), records.saved_states(), records.segments()) == ([1], [3], [1, 4])
    Recorded(tmp_path)
    assert (records.steps(), records.saved_states()) == ([], []), "a state of a life that ended is another's"


@pytest.mark.parametrize(("events", "kept"), [("[nonfinite, alarm]", [1]), ("[nonfinite]", [])])
def test_the_records_of_a_step_with_an_alarm_stay(tmp_path: Path, events: str, kept: list[int]) -> None:
    recorded = Recorded(tmp_path, record=f"{{nodes: [reward], keep_last: 1, keep_on: {events}}}")
    alarm = Alarm(1, parse_condition("entropy < 1"), stops=False, begins=True, value=0.5, usual=None)
    asyncio.run(recorded.step(alarms=[alarm]))
    assert recorded.records.kept() == kept
    assert recorded.notes == ["step 1: entropy < 1; the records of the steps before it are kept"][: len(kept)]


def test_segments_that_stay_are_remembered(tmp_path: Path) -> None:
    records = Records(tmp_path)
    assert records.kept() == []
    records.folder.mkdir()
    records.keep([1, 5])
    assert records.kept() == [1, 5]


@pytest.mark.parametrize(
    ("nodes", "tasks"),
    [
        (["reward"], {"reward"}),
        (["update"], {"update"}),
        # A frozen copy needs no updates; a generator needs those of its source.
        (["ref"], {"ref"}),
        (["rollout"], {"rollout", "update"}),
        (["values"], {"values", "critic"}),
    ],
)
def test_the_updates_that_lead_to_a_nodes_weights_are_recorded_with_it(nodes: list[str], tasks: set[str]) -> None:
    pipeline = load_pipeline(TEMPLATE).pipeline
    assert recorded_tasks(make_plan(pipeline, build_graph(pipeline)), nodes) == tasks
