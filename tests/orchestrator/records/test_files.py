"""The files of records."""

from pathlib import Path

import numpy as np
import pytest

from dagrl.data.batch import Batch, Column
from dagrl.orchestrator.records.files import (
    NodeRecord,
    RecordedInputs,
    RecordedRun,
    RecordError,
    Records,
    ranges,
)


def record(records: Records, step: int, node: str = "update", value: float = 0.0) -> NodeRecord:
    block = records.columns.put_block(Batch(np.arange(2), {"a": Column(np.full(2, value))}), ("a",))
    inputs = RecordedInputs(order=1, shards=(0,), round=0, ends=True, rows=[], sources={"rollout": [block]})
    return NodeRecord(
        step=step, node=node, executor="actor", trains=True, pipeline="p", versions={}, code="", group_size=2,
        runs=[RecordedRun(inputs=inputs)],
    )  # fmt: skip


def test_a_record_comes_back(tmp_path: Path) -> None:
    records = Records(tmp_path)
    written = record(records, 3)
    records.write(written)
    assert records.read(3, "update") == written
    assert (records.steps(), records.nodes(3)) == ([3], ["update"])


def test_columns_of_other_steps_survive_a_removal(tmp_path: Path) -> None:
    records = Records(tmp_path)
    for step, value in ((1, 1.0), (2, 2.0), (3, 2.0)):
        records.write(record(records, step, value=value))
    records.state(0).mkdir(parents=True)
    records.remove([1, 2], [0])
    (run,) = records.read(3, "update").runs
    assert records.columns.get_block(run.inputs.sources["rollout"][0])["a"].values.tolist() == [2.0, 2.0]
    assert records.steps() == [3] and not records.state(0).exists()
    assert len(list(records.columns_folder.iterdir())) == 2


@pytest.mark.parametrize(
    ("step", "node", "told"),
    [
        (9, "update", "step 9 is not recorded; .* has steps 1-2"),
        (2, "updat", "`updat` is not recorded in step 2; recorded nodes: update"),
    ],
)
def test_missing_records_are_reported(tmp_path: Path, step: int, node: str, told: str) -> None:
    records = Records(tmp_path)
    for each in (1, 2):
        records.write(record(records, each))
    with pytest.raises(RecordError, match=told):
        records.read(step, node)


def test_a_run_without_records_gets_a_hint(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match=r"has no records; set `run.record: \[update\]`"):
        Records(tmp_path).read(1, "update")


@pytest.mark.parametrize("text", ["", "{", '{"step": 1}'])
def test_a_damaged_document_is_refused(tmp_path: Path, text: str) -> None:
    records = Records(tmp_path)
    records.write(record(records, 1))
    (records.folder / "step_1" / "update.json").write_text(text)
    with pytest.raises(RecordError, match=r"update\.json holds something else than was written"):
        records.read(1, "update")


@pytest.mark.parametrize(
    ("steps", "told"), [([4], "step 4"), ([1, 2, 3], "steps 1-3"), ([1, 3, 4, 9], "steps 1, 3-4, 9")]
)
def test_ranges(steps: list[int], told: str) -> None:
    assert ranges(steps) == told
