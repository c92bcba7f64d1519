"""Pipelines from Python: ``dagrl.load("pipeline.yaml").run()``. Imports nothing heavy."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from dagrl.config.errors import Problem
from dagrl.resources import pipeline_file

if TYPE_CHECKING:
    import networkx

_OUT_OF_TIME, _ALARM, _INTERRUPTED = 4, 5, 130
_WARNING = "dagrl run: warning: "


class RunFailedError(RuntimeError):
    """A run failed, or was refused. The message is that of `dagrl run`: node, worker and cause."""


@dataclass(frozen=True, slots=True, repr=False)
class RunResult:
    """The outcome of a run. `print` shows its folder, its last step and its main metrics."""

    folder: Path
    """The run folder: docs/run_folder.md describes its files."""
    step: int
    """Newest finished step."""
    stopped: bool
    """Whether it was stopped before its last step."""
    metrics: list[dict[str, float]]
    """One dict for each line of metrics.jsonl, with ``step``."""

    def series(self, name: str) -> tuple[list[int], list[float]]:
        """Steps with a metric, and its values. KeyError if no step has it."""
        values = [(int(line["step"]), line[name]) for line in self.metrics if name in line]
        if not values:
            raise KeyError(name)
        return [step for step, _ in values], [value for _, value in values]

    def __repr__(self) -> str:
        lines = f"{len(self.metrics)} line{'' if len(self.metrics) == 1 else 's'}"
        return f"RunResult(folder={str(self.folder)!r}, step={self.step}, stopped={self.stopped}, metrics=[{lines}])"

    def __str__(self) -> str:
        from dagrl.reporting.run_data.run_reader import RunReader
        from dagrl.reporting.summary import main_metrics
        from dagrl.tables import render

        run = RunReader(self.folder)
        run.steps = self.metrics
        heading = f"{'stopped after' if self.stopped else 'finished'} step {self.step}, in {self.folder}"
        return render([heading, *main_metrics(run)]).rstrip()


@dataclass(frozen=True, slots=True)
class PipelineHandle:
    """A pipeline file with overrides. `load` makes it."""

    path: Path
    overrides: tuple[str, ...]
    """As on the command line: ``run.steps=10``."""
    name: str
    steps: int
    """Steps of a whole run; with ``run.epochs`` at most."""
    epochs: float | None = None
    """``run.epochs``."""
    only_validates: bool = False
    """Whether `run` validates, and trains nothing."""

    def validate(self) -> list[Problem]:
        """Check everything that needs no engine, and return the warnings. PipelineError with all problems."""
        from dagrl.validation.prepare import prepare

        return list(prepare(self.path, self.overrides).warnings)

    @property
    def graph(self) -> networkx.DiGraph[str]:
        """The DAG, with its implicit nodes `prompts` and `samples`, in topological order.

        A node's attribute ``node`` has its section (``spec``), ``inputs`` and ``outputs``; an edge's ``columns`` are
        the names of the columns that it carries. PipelineError with all problems.
        """
        from dagrl.validation import check_file

        return check_file(self.path, self.overrides).graph.digraph

    def plan(self, gpu: str | None = None) -> dict[str, Any]:
        """Estimate memory and time, as `dagrl plan --json` does: docs/plan.md describes the keys.

        `gpu` is the GPU of groups that name none. PipelineError; ValueError for an unknown GPU or model.
        """
        from dagrl.backends.planning.gpus import DEFAULT_GPU
        from dagrl.planner.published import with_published_models
        from dagrl.planner.showing import report, show, show_steps

        overrides, _ = with_published_models(self.path, self.overrides)
        planned = report.report(self.path, overrides, gpu=gpu or DEFAULT_GPU)
        return show.as_values(planned, show_steps.plan_sections(planned))

    def run(self, run_dir: Path | str | None = None, *, resume: bool = True, quiet: bool = False) -> RunResult:
        """Train, or go on from the newest checkpoint in the run folder.

        Starts `dagrl run` in another process, so that this one loads no engines and can run several pipelines, one
        after the other. An interrupt finishes the step, saves and returns; a second one stops
        at once and raises KeyboardInterrupt.

        Args:
            run_dir: The run folder; by default ``runs/NAME`` in the working directory.
            resume: If false, a folder that holds a checkpoint is refused.
            quiet: Whether to print warnings and failures only.

        Raises:
            RunFailedError: The run failed, or may not use the folder.
        """
        import tempfile

        from dagrl.reporting.run_data.run_reader import read_run

        folder = Path("runs") / self.name if run_dir is None else Path(run_dir).expanduser()
        # -P: modules of the working directory are not found before Python's own.
        command = [sys.executable, "-P", "-m", "dagrl", "run", str(self.path), *self.overrides]
        command += [] if resume else ["run.resume=never"]
        command += ["--run-dir", str(folder), *(["--quiet"] if quiet else [])]
        with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors:
            code = _run_to_its_end(command, errors)
            errors.seek(0)
            text = errors.read().strip()
        if code == _INTERRUPTED:
            raise KeyboardInterrupt
        lines = text.splitlines()
        warnings = [line for line in lines if code in (0, _OUT_OF_TIME, _ALARM) or line.startswith(_WARNING)]
        for line in warnings:
            print(line, file=sys.stderr)
        if code not in (0, _OUT_OF_TIME, _ALARM):
            failure = "\n".join(line for line in lines if not line.startswith(_WARNING))
            raise RunFailedError(failure or f"dagrl run exited with {code}")
        record = read_run(folder)
        epoch = max((line["epoch"] for line in record.steps if "epoch" in line), default=0.0)
        through = self.only_validates or record.last_step >= self.steps
        stopped = not through and (self.epochs is None or epoch < self.epochs)
        return RunResult(folder, record.last_step, stopped, list(record.steps))


def load(pipeline: Path | str, overrides: Mapping[str, object] | None = None) -> PipelineHandle:
    """Read a pipeline file, or one of dagrl's templates by its name.

    Args:
        pipeline: The YAML file, or a template's name such as ``tiny_grpo``.
        overrides: Keys to set, as on the command line: ``{"run.steps": 10}``. None removes a key.

    Raises:
        PipelineError: The file cannot be read, or has problems of form; `PipelineHandle.validate` checks the rest.
    """
    from dagrl.config.loading.loader import load_pipeline

    path = pipeline_file(Path(pipeline).expanduser())
    written = tuple(f"{key}={json.dumps(value)}" for key, value in (overrides or {}).items())
    loaded = load_pipeline(path, written).pipeline
    return PipelineHandle(path, written, loaded.name, loaded.run.steps, loaded.run.epochs, loaded.run.only_validates)


def _run_to_its_end(command: list[str], errors: IO[str]) -> int:
    """Run a command, print its output line by line, pass interrupts on, and return its exit code."""
    import signal
    import subprocess

    # In its own process group, so that Ctrl-C in a terminal arrives once, from here.
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=errors, text=True, encoding="utf-8", errors="replace", process_group=0
    )
    assert process.stdout is not None
    while True:
        try:
            for line in process.stdout:
                print(line, end="", flush=True)
            return process.wait()
        except KeyboardInterrupt:
            process.send_signal(signal.SIGINT)
