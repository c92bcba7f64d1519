"""Where two runs part, from what is in their folders."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from finished_runs import sample, write_run, write_samples

from dagrl.cli import main
from dagrl.data.batch import Batch, Column
from dagrl.orchestrator.records.files import (
    NodeRecord,
    RecordedBlock,
    RecordedInputs,
    RecordedOutputs,
    RecordedRun,
    Records,
)


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    return [write_run(tmp_path / name) for name in ("a", "b")]


def test_equal_runs(runs: list[Path], capsys) -> None:
    for run in runs:
        write_record(run, 2, "ref", 1, {"prompt": 0.0}, {"ref_logprob": 1.0})
    assert main(["diff", *map(str, runs)]) == 0
    assert "are equal; compared: records of step 2, metrics of steps 1-4" in capsys.readouterr().out
    assert main(["diff", *map(str, runs), "--json"]) == 0
    compared = ["records of step 2", "metrics of steps 1-4"]
    found = {"equal": True, "parting": None, "pipelines": "", "compared": compared}
    assert json.loads(capsys.readouterr().out) == found


@pytest.mark.parametrize(
    ("given", "node", "told"),
    [
        # The first one in the order of starts, not of names.
        ({"ref": 1.0, "advantage": 1.0}, "ref", "column out: 1 of 2 rows differ (1); row 1: 1.0 and 2.0"),
        ({"advantage": 1.0}, "advantage", "its inputs are equal"),
    ],
)
def test_the_first_node_with_other_outputs_is_named(
    runs, given: dict[str, float], node: str, told: str, capsys
) -> None:
    for run, change in zip(runs, ({}, given), strict=True):
        for step in (1, 2):
            for order, name in enumerate(("ref", "advantage"), 1):
                write_record(run, step, name, order, {"in": 0.0}, {"out": 1.0}, change.get(name, 0.0) * (step == 2))
    assert main(["diff", *map(str, runs)]) == 1
    out = capsys.readouterr().out
    assert f"part in step 2, at node {node}\n" in out and told in out


def test_inputs_that_no_recorded_node_wrote_are_named_by_their_writer(runs, capsys) -> None:
    for run, value in zip(runs, (0.0, 3.0), strict=True):
        write_record(run, 1, "ref", 1, {"prompt_tokens": value}, {"ref_logprob": value})
    assert main(["diff", *map(str, runs)]) == 1
    out = capsys.readouterr().out
    assert "part in step 1, at node prompts\n" in out and "`ref` reads it; `prompts` is not recorded" in out


def test_samples_name_column_row_and_node(runs, capsys) -> None:
    for run, response in zip(runs, ("4", "5"), strict=True):
        for step in (1, 2):
            write_samples(run, step, [sample(0), sample(1, response=response if step == 2 else "4")])
    change_metrics(runs[1], 2, {"reward/mean": 9.0})
    assert main(["diff", *map(str, runs)]) == 1
    out = capsys.readouterr().out
    assert "part in step 2, at node rollout\n" in out
    assert "column response: 1 of 2 rows differ; row 1: '4' and '5'" in out
    assert main(["diff", *map(str, runs), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert "samples of steps 1-2" in found["compared"]
    parting = found["parting"]
    assert (parting["step"], parting["node"]) == (2, "rollout")
    assert parting["differences"][0]["what"] == "column response" and parting["differences"][0]["rows"] == [1]


def test_metrics_name_the_step_and_times_do_not_count(runs, capsys) -> None:
    change_metrics(runs[1], 1, {"time/step_s": 99.0})
    change_metrics(runs[1], 3, {"reward/mean": 9.0})
    assert main(["diff", *map(str, runs)]) == 1
    out = capsys.readouterr().out
    assert "part in step 3\n" in out and "metric reward/mean: 0.3 and 9.0" in out and "run.record" in out


def test_folders_that_cannot_be_compared(runs, tmp_path: Path, capsys) -> None:
    assert main(["diff", str(runs[0]), str(tmp_path / "none")]) == 2
    assert "is not a folder" in capsys.readouterr().err
    (runs[1] / "metrics.jsonl").write_text("")
    assert main(["diff", *map(str, runs)]) == 2
    assert "have no steps in common" in capsys.readouterr().err


def change_metrics(run: Path, step: int, changed: dict[str, float]) -> None:
    lines: list[dict[str, Any]] = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    lines[step - 1] |= changed
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def write_record(
    run: Path, step: int, node: str, order: int, inputs: dict[str, float], outputs: dict[str, float], change: float = 0
) -> None:
    """Two rows of each column; `change` is added to the second row of the outputs."""
    records = Records(run)

    def block(columns: dict[str, float], change: float = 0.0) -> Any:
        made = {name: Column(np.array([value, value + change])) for name, value in columns.items()}
        return records.columns.put_block(Batch(np.arange(2), made), made)

    taken = RecordedInputs(
        order=order, shards=(0,), round=0, ends=True, rows=[], sources={"prompts": [block(inputs)]}
    )  # fmt: skip
    gave = RecordedOutputs(blocks=[RecordedBlock(worker="actor/0", block=block(outputs, change))], metrics={})
    records.write(
        NodeRecord(
            step=step, node=node, executor="actor", trains=False, pipeline="p", versions={}, code="", group_size=1,
            runs=[RecordedRun(inputs=taken, outputs=gave)],
        )
    )  # fmt: skip
