"""The layout in which a node is replayed, and errors before engines start."""

import fcntl
import os
from pathlib import Path

import pytest

from dagrl.cli import main
from dagrl.config.loading.loader import load_pipeline
from dagrl.orchestrator.records.files import RecordError
from dagrl.orchestrator.replay.target import layout_overrides

TEMPLATES = Path(__file__).parents[3] / "dag_templates"
TINY = TEMPLATES / "tiny_grpo.yaml"
ON_GPUS = ("groups.train={nodes: 2, gpus_per_node: 8}", "engines.actor.parallel={tensor_model_parallel_size: 4}")


@pytest.mark.parametrize(
    ("base", "layout", "to_cpu", "alone", "group", "tensor"),
    [
        ((), ["tensor_model_parallel_size=2"], False, False, "cpus_per_node: 2", 2),
        ((), ["cpus_per_node=4", "tensor_model_parallel_size=2"], False, False, "cpus_per_node: 4", 2),
        ((), [], True, False, None, 1),
        (ON_GPUS, ["tensor_model_parallel_size=2"], False, False, "gpus_per_node: 16", 2),
        (ON_GPUS, [], True, False, "cpus_per_node: 1", 1),
        (ON_GPUS, ["tensor_model_parallel_size=2"], True, False, "cpus_per_node: 2", 2),
        (ON_GPUS, [], False, True, "gpus_per_node: 1", 1),
        (ON_GPUS, [], False, False, None, 4),
    ],
)
def test_layouts(base, layout, to_cpu, alone, group, tensor) -> None:
    overrides = layout_overrides(load_pipeline(TINY, base).pipeline, "actor", layout, to_cpu=to_cpu, alone=alone)
    pipeline = load_pipeline(TINY, [*base, *overrides]).pipeline
    actor = pipeline.engines["actor"]
    assert actor.parallel.tensor_model_parallel_size == tensor
    assert (f"groups.replay_actor={{{group}}}" in overrides) is (group is not None)
    assert actor.group == ("replay_actor" if group else "train")


def test_a_layout_that_is_none_is_refused() -> None:
    pipeline = load_pipeline(TINY).pipeline
    with pytest.raises(RecordError, match="--layout tp is not KEY=VALUE"):
        layout_overrides(pipeline, "actor", ["tp"], to_cpu=False)
    with pytest.raises(RecordError, match="the node has no engine"):
        layout_overrides(pipeline, "host", ["cpus_per_node=2"], to_cpu=False)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--step", "1", "--node", "update"], "has no records; set `run.record: [update]`"),
        (["--step", "1", "--debug"], "--layout and --debug are for one node; add --node"),
    ],
)
def test_a_wrong_call_ends_in_one_sentence(tmp_path: Path, capsys, arguments: list[str], told: str) -> None:
    (tmp_path / "pipeline.yaml").write_text(load_pipeline(TINY).to_yaml())
    assert main(["replay", str(tmp_path), *arguments]) == 2
    error = capsys.readouterr().err
    assert told in error and error.count("\n") == 1


def test_a_folder_without_a_run_and_a_run_that_continues_are_refused(tmp_path: Path, capsys) -> None:
    assert main(["replay", str(tmp_path), "--step", "1"]) == 2
    assert "is no run folder" in capsys.readouterr().err
    (tmp_path / "pipeline.yaml").write_text(load_pipeline(TINY).to_yaml())
    with (tmp_path / ".lock").open("a+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.write(f"{os.getpid()}\n")
        lock.flush()
        assert main(["replay", str(tmp_path), "--step", "1"]) == 2
    assert f"is still going on (pid {os.getpid()}); wait until it ends" in capsys.readouterr().err
