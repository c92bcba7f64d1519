"""Profiles: traces that can be opened, only where they were asked for."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter
from work import work_of as make_work

from dagrl.config.schema import Pipeline
from dagrl.ops.work import TaskWork
from dagrl.workers.errors import RunError
from dagrl.workers.messages import StartEngine
from dagrl.workers.profiled import python_of
from dagrl.workers.profiling import NvtxRanges, TorchTraces, make_profiler

NSYS = """#!/bin/sh
printf '%s\\n' "$@" > "$(dirname "$0")/arguments"
while [ "${1#/}" = "$1" ]; do shift; done
exec "$@"
"""
"""Stands in for nsys, which CI has not: notes what it was asked, then runs the program as nsys does."""


@pytest.fixture
def nsys(tmp_path, monkeypatch) -> Path:
    """A folder on the PATH with an nsys in it; what it was asked is in ``arguments``."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "nsys").write_text(NSYS)
    (folder / "nsys").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    monkeypatch.delenv("NSYS_PROFILING_SESSION_ID", raising=False)
    return folder


@pytest.fixture
def pipeline(lab) -> Any:
    """Makes the tiny pipeline with a profile section of these keys."""

    def make(**profile: Any) -> Pipeline:
        return TypeAdapter(Pipeline).validate_python(lab.tiny_pipeline() | {"profile": {"steps": [2], **profile}})

    return make


def setup_of(pipeline: Pipeline, folder: Path, engine: str = "actor", rank: int = 0) -> StartEngine:
    return StartEngine(pipeline, None, folder, engine, rank, 2, trained=True, keeps_start_weights=False)


def work_of(node: str | None, step: int = 2, task: str | None = None) -> TaskWork:
    return make_work(TaskWork, task or node or "prompts", node=node, step=step)


def traces(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*.gz"))


def trace(path: Path) -> dict[str, Any]:
    with gzip.open(path, "rt") as file:
        return json.load(file)


def operations(path: Path) -> set[str]:
    return {event["name"] for event in trace(path)["traceEvents"] if event.get("cat") == "cpu_op"}


@pytest.mark.slow
def test_a_profiled_run_leaves_traces_of_the_asked_nodes(on_one_slot):
    """With the same numbers as any other: see `test_layouts`."""
    run = on_one_slot
    folder = run.folder / "profile"
    # The reference has the slot when the rollout is over: both shards of the step are one run.
    each_step = ["ref-reference-0", "rollout-generator-0", "update-actor-0"]
    expected = [f"step_{step}/{name}.json.gz" for step in (2, 3) for name in each_step]
    assert traces(folder) == sorted([*expected, "step_3/val-rollout-generator-0.json.gz"])
    update = trace(folder / "step_3" / "update-actor-0.json.gz")
    assert update["dagrl"] == {"step": 3, "node": "update", "engine": "actor", "engine_rank": 0}
    (annotation,) = [event for event in update["traceEvents"] if event["name"] == "step 3/update"]
    multiplications = [event for event in update["traceEvents"] if event["name"] == "aten::mm"]
    assert multiplications
    assert all(0 <= event["ts"] - annotation["ts"] <= annotation["dur"] for event in multiplications)
    # An update has a backward pass, a forward pass for log-probs has none.
    assert any("Backward" in name for name in operations(folder / "step_2" / "update-actor-0.json.gz"))
    assert not any("Backward" in name for name in operations(folder / "step_2" / "ref-reference-0.json.gz"))
    assert "profile  traces" in run.output


def test_only_the_asked_steps_nodes_and_ranks_are_traced(pipeline, tmp_path):
    profiler = make_profiler(setup_of(pipeline(nodes=["update", "old"]), tmp_path))
    assert isinstance(profiler, TorchTraces)
    for work in (work_of("update", step=1), work_of("ref"), work_of(None), work_of("update"), work_of("old", step=3)):
        with profiler.around(work):
            torch.ones(2).add(1)
    assert traces(tmp_path) == ["profile/step_2/update-actor-0.json.gz"]
    assert make_profiler(setup_of(pipeline(), tmp_path, rank=1)) is None
    assert make_profiler(setup_of(pipeline(ranks=[1]), tmp_path, rank=1)) is not None
    assert make_profiler(setup_of(pipeline(nodes=["rollout"]), tmp_path)) is None


def test_the_reference_is_traced_on_the_ranks_it_shares(pipeline, tmp_path):
    profiler = make_profiler(setup_of(pipeline(nodes=["ref"]), tmp_path))
    with profiler.around(work_of("ref")):
        torch.ones(2).add(1)
    assert traces(tmp_path) == ["profile/step_2/ref-reference-0.json.gz"]


def test_runs_of_a_node_in_one_step_are_numbered(pipeline, tmp_path):
    profiler = make_profiler(setup_of(pipeline(steps=[2, 3]), tmp_path))
    for step, operation in ((2, torch.exp), (2, torch.sin), (3, torch.cos)):
        with profiler.around(work_of("old", step=step)):
            operation(torch.ones(2))
    names = ("step_2/old-actor-0", "step_2/old-actor-0-2", "step_3/old-actor-0")
    seen = [operations(tmp_path / "profile" / f"{name}.json.gz") for name in names]
    assert [name for each in seen for name in ("aten::exp", "aten::sin", "aten::cos") if name in each] == [
        "aten::exp",
        "aten::sin",
        "aten::cos",
    ]


def test_stacks_and_memory_are_recorded_where_asked_for(pipeline, tmp_path):
    for name, options in (("plain", {}), ("rich", {"with_stack": True, "with_memory": True})):
        with make_profiler(setup_of(pipeline(**options), tmp_path / name)).around(work_of("update")):
            torch.ones(1000).add(1)
    plain, rich = (
        trace(tmp_path / name / "profile" / "step_2" / "update-actor-0.json.gz")["traceEvents"]
        for name in ("plain", "rich")
    )
    assert {"python_function", "cpu_instant_event"} <= {event.get("cat") for event in rich}
    assert not {"python_function", "cpu_instant_event"} & {event.get("cat") for event in plain}


def test_a_run_that_fails_fails_as_itself_and_leaves_no_trace(pipeline, tmp_path):
    profiler = make_profiler(setup_of(pipeline(), tmp_path))
    with pytest.raises(FloatingPointError, match="not finite"), profiler.around(work_of("update")):
        raise FloatingPointError("the gradient is not finite")
    assert traces(tmp_path) == []
    with profiler.around(work_of("update")):
        torch.ones(2).add(1)
    assert traces(tmp_path) == ["profile/step_2/update-actor-0.json.gz"]


def test_a_trace_that_cannot_be_written_is_named(pipeline, tmp_path):
    (tmp_path / "profile").write_text("in the way")
    with (
        pytest.raises(OSError, match=r"cannot write .*profile/step_2/update-actor-0\.json\.gz"),
        make_profiler(setup_of(pipeline(), tmp_path)).around(work_of("update")),
    ):
        torch.ones(2).add(1)


# -- nsys


@pytest.mark.skipif(torch.cuda.is_available(), reason="here nsys has a GPU to look at")
def test_nsys_without_a_gpu_is_refused_where_a_profiled_node_runs(pipeline, tmp_path):
    with pytest.raises(ValueError, match="nsys profiles GPUs, and engine actor has none; set tool: torch"):
        make_profiler(setup_of(pipeline(tool="nsys", nodes=["update"]), tmp_path))
    assert make_profiler(setup_of(pipeline(tool="nsys", nodes=["update"]), tmp_path, engine="generator")) is None


def test_the_capture_lasts_from_the_first_profiled_run_of_a_step_to_the_next_step(pipeline, monkeypatch):
    seen: list[str] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda.profiler, "start", lambda: seen.append("start"))
    monkeypatch.setattr(torch.cuda.profiler, "stop", lambda: seen.append("stop"))
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", seen.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: seen.append("pop"))

    def ranges(rank: int) -> list[str]:
        seen.clear()
        profile = pipeline(tool="nsys", steps=[2, 3, 5], nodes=["update"]).profile
        profiler = NvtxRanges(profile, rank)
        for step, node in (
            (1, "update"),
            (2, "ref"),
            (2, "update"),
            (2, "old"),
            (3, "update"),
            (4, "ref"),
            (5, "update"),
        ):
            with profiler.around(work_of(node, step=step)):
                pass
        profiler.close()
        return [each for each in seen if each != "pop"]

    labels = [
        "step 1/update",
        "step 2/ref",
        "step 2/update",
        "step 2/old",
        "step 3/update",
        "step 4/ref",
        "step 5/update",
    ]
    assert [each for each in ranges(0) if each.startswith("step")] == labels
    first, second, third = labels[2:4], labels[4:5], labels[6:]
    assert ranges(0) == [
        *labels[:2],
        *("start", *first, "stop"),
        *("start", *second, "stop"),
        labels[5],
        *("start", *third, "stop"),
    ]
    # Other ranks have the ranges, for whoever looks at them in another way.
    assert ranges(1) == labels


def test_nsys_starts_the_python_of_the_profiled_ranks_only(pipeline, nsys, tmp_path):
    profiled = pipeline(tool="nsys", nodes=["ref", "old"], ranks=[1])
    folder = tmp_path / "a run's folder"
    command = python_of(profiled, "actor", 1, folder)
    assert command is not None
    assert python_of(profiled, "actor", 0, folder) is None
    assert python_of(profiled, "generator", 1, folder) is None
    assert python_of(pipeline(ranks=[1]), "actor", 1, folder) is None
    said = subprocess.run(
        ["bash", "-c", f"exec {command} -c 'print(6 * 7)'"], capture_output=True, text=True, check=True
    )
    assert said.stdout == "42\n"
    arguments = (nsys / "arguments").read_text().splitlines()
    assert arguments[0] == "profile"
    assert {"--capture-range=cudaProfilerApi", "--capture-range-end=repeat", "--trace=cuda,nvtx"} <= set(arguments)
    assert f"--output={folder / 'profile' / 'actor-1'}" in arguments
    assert (folder / "profile").is_dir()


def test_under_another_nsys_workers_are_not_given_a_second(pipeline, nsys, tmp_path, monkeypatch):
    monkeypatch.setenv("NSYS_PROFILING_SESSION_ID", "17")
    assert python_of(pipeline(tool="nsys"), "actor", 0, tmp_path) is None


def test_missing_nsys_is_reported_before_anything_starts(pipeline, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("NSYS_PROFILING_SESSION_ID", raising=False)
    with pytest.raises(RunError, match="there is no nsys on the PATH"):
        python_of(pipeline(tool="nsys"), "actor", 0, tmp_path)


@pytest.mark.slow
def test_ray_starts_a_worker_by_the_command(pipeline, nsys, tmp_path):
    program = f"""
import ray
ray.init(address="local", num_cpus=1, include_dashboard=False, object_store_memory=2**27, log_to_driver=False)

@ray.remote
class Worker:
    def twice(self, number):
        return 2 * number

command = {python_of(pipeline(tool="nsys"), "actor", 0, tmp_path)!r}
worker = Worker.options(runtime_env={{"py_executable": command}}).remote()
print(ray.get(worker.twice.remote(21), timeout=240))
"""
    said = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=300,
        env={"PATH": f"{nsys}:/usr/bin:/bin", "HOME": str(tmp_path), "RAY_USAGE_STATS_ENABLED": "0"},
    )
    assert said.stdout.strip() == "42", said.stderr
    arguments = (nsys / "arguments").read_text()
    assert "default_worker.py" in arguments
    assert f"--output={tmp_path / 'profile' / 'actor-0'}" in arguments
