"""Pipelines from Python. tests/test_wheel.py trains one, in docs/demo.ipynb."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import networkx
import pytest

import dagrl
from dagrl import api

HEAVY = {"networkx", "torch", "ray", "transformers", "megatron", "sglang", "pyarrow", "numpy", "datasets", "typer"}


def test_importing_dagrl_imports_nothing_heavy() -> None:
    program = "import sys, dagrl; dagrl.load('tiny_grpo'); print(*{name.partition('.')[0] for name in sys.modules})"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    assert HEAVY.intersection(loaded) == set()


def test_overrides_are_values(project) -> None:
    given = {"run.steps": 7, "name": "seven", "engines.actor.optimizer.lr": 3e-6}
    given |= {"engines.reference": None, "nodes.ref": None, "nodes.update.loss.kl_coef": 0.0}
    handle = dagrl.load(project.folder / "p.yaml", given)
    assert (handle.name, handle.steps) == ("seven", 7)
    assert handle.validate() == []
    assert handle.plan()["fits"] is True


def test_errors_of_the_file_are_reported_on_load_and_the_others_on_validate(project) -> None:
    with pytest.raises(dagrl.PipelineError, match="unknown key `step`"):
        dagrl.load(project.folder / "p.yaml", {"run.step": 7})
    handle = dagrl.load(project.folder / "p.yaml", {"data.train": "gone.parquet"})
    with pytest.raises(dagrl.PipelineError, match="does not exist"):
        handle.validate()


def test_the_graph_is_networkx_own(project) -> None:
    graph = dagrl.load(project.folder / "p.yaml").graph
    assert networkx.is_directed_acyclic_graph(graph)
    assert [*graph] == ["prompts", "rollout", "reward", "ref", "advantage", "update", "samples"]
    assert graph.edges["rollout", "reward"]["columns"] == ("response_tokens", "finish_reason")
    assert graph.nodes["update"]["node"].spec.op == "update"
    path = networkx.dag_longest_path(graph, weight=None)
    assert path == ["prompts", "rollout", "reward", "advantage", "update"]


def test_warnings_are_returned(project, monkeypatch) -> None:
    monkeypatch.chdir(project.folder)
    handle = dagrl.load("p.yaml", {"data.val": "train.parquet"})
    assert [warning.code for warning in handle.validate()] == ["unused-validation-set"]


def test_a_refused_run_says_why(project, monkeypatch) -> None:
    monkeypatch.chdir(project.folder)
    (project.folder / "full").mkdir()
    (project.folder / "full" / "notes.txt").write_text("")
    with pytest.raises(dagrl.RunFailedError, match=r"^dagrl run: full .*notes\.txt"):
        dagrl.load("p.yaml").run("full", quiet=True)


def test_a_failure_begins_with_what_failed_and_warnings_are_printed(project, monkeypatch, capsys) -> None:
    monkeypatch.chdir(project.folder)
    (project.folder / "full").mkdir()
    (project.folder / "full" / "notes.txt").write_text("")
    unused = {"data.val": "train.parquet"}
    with pytest.raises(dagrl.RunFailedError, match=r"^dagrl run: full .*notes\.txt"):
        dagrl.load("p.yaml", unused).run("full", quiet=True)
    assert "dagrl run: warning: " in capsys.readouterr().err


def test_a_metric_is_a_series_of_the_steps_that_have_it() -> None:
    result = dagrl.RunResult(Path(), 2, False, [{"step": 0, "val/reward/mean": 0.1}, {"step": 1, "reward/mean": 0.5}])
    assert result.series("reward/mean") == ([1], [0.5])
    with pytest.raises(KeyError, match="kl"):
        result.series("kl")


@pytest.mark.parametrize(
    ("result", "printed", "shown"),
    [
        (
            dagrl.RunResult(
                Path("runs/a b"), 2, True, [{"step": 1, "reward/mean": 0.25}, {"step": 2, "reward/mean": 0.5}]
            ),
            "stopped after step 2, in runs/a b\n               first  last  best\n  reward/mean   0.25   0.5   0.5",
            "RunResult(folder='runs/a b', step=2, stopped=True, metrics=[2 lines])",
        ),
        (
            dagrl.RunResult(Path("new"), 0, False, [{"step": 0, "val/mean@1": 0.5}]),
            "finished step 0, in new\n  validation of the start weights\n  val/mean@1  0.5",
            "RunResult(folder='new', step=0, stopped=False, metrics=[1 line])",
        ),
        (
            dagrl.RunResult(Path("new"), 0, True, []),
            "stopped after step 0, in new",
            "RunResult(folder='new', step=0, stopped=True, metrics=[0 lines])",
        ),
    ],
)
def test_a_result_prints_what_has_come_of_the_run(result, printed, shown) -> None:
    assert (str(result), repr(result)) == (printed, shown)


CHILD = """
import signal, sys
print("begun", flush=True)
for _ in range(2):
    try:
        signal.pause()
    except KeyboardInterrupt:
        print("interrupted", flush=True)
sys.exit(7)
"""


def test_interrupts_are_passed_on(capsys, monkeypatch) -> None:
    interrupts = iter(range(2))

    def interrupt_after(line: str, **options: object) -> None:
        if next(interrupts, None) is not None:
            threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
        lines.append(line)

    lines: list[str] = []
    monkeypatch.setattr(api, "print", interrupt_after, raising=False)
    with tempfile.TemporaryFile("w+") as errors:
        assert api._run_to_its_end([sys.executable, "-c", CHILD], errors) == 7
    assert lines == ["begun\n", "interrupted\n", "interrupted\n"]
