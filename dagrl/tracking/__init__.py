"""Trackers of a run: console, metrics.jsonl, TensorBoard, wandb, MLflow, SwanLab and the timeline.

`open_trackers` opens the trackers of a pipeline; the orchestrator calls all of them through `Trackers`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from dagrl.config.schema import TrackerSpec
from dagrl.redact import hide_secrets, hiding, without_secrets
from dagrl.tracking.background_tracker import BackgroundTracker, OwnTracker
from dagrl.tracking.base import Progress, SampleTable, SampleTracker, Tracker
from dagrl.tracking.console import Console, Verbosity
from dagrl.tracking.metrics_file import MetricsFile
from dagrl.tracking.mlflow import Mlflow
from dagrl.tracking.swanlab import SwanLab
from dagrl.tracking.tensorboard import TensorBoard
from dagrl.tracking.timeline import Timeline
from dagrl.tracking.wandb import Wandb

__all__ = ["Timeline", "Tracker", "Trackers", "open_trackers"]


class Trackers:
    """All trackers of a run. As a context manager it closes them, as failed if an exception is raised."""

    def __init__(
        self,
        trackers: Sequence[Tracker],
        timeline: Timeline,
        console: Console | None,
        samples: Path,
        shown: int,
        hide: Callable[[str], str] = hide_secrets,
    ) -> None:
        """`samples` is the folder of the steps' samples; `shown` rows of each validation go to trackers.

        `hide` removes the secrets from notes.
        """
        self._hide = hide
        self._metrics_file = next((tracker for tracker in trackers if isinstance(tracker, MetricsFile)), None)
        self._trackers = trackers
        self._console = console
        self._samples, self._shown = samples, shown
        self.timeline = timeline

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record a step in all trackers, in metrics.jsonl first. Raises OSError if a file cannot be written."""
        for tracker in self._trackers:
            tracker.log(step, metrics)
        showing = [tracker for tracker in self._trackers if isinstance(tracker, SampleTracker)]
        if not showing or not any(name.startswith("val/") for name in metrics):
            return
        try:
            table = read_samples(self._samples / f"step_{step}_val.parquet", self._shown)
        except (OSError, ValueError) as error:
            self.note(f"the samples of step {step} cannot be shown: {error}")
            return
        if table is not None:
            for tracker in showing:
                tracker.samples(step, table)

    def add_lost(self, metrics: Mapping[str, float]) -> None:
        """Record the samples of an unfinished step, in metrics.jsonl alone. Raises OSError."""
        if self._metrics_file is not None:
            self._metrics_file.add_lost(metrics)

    def progress(self, progress: Progress) -> None:
        """Show the progress of a rollout; cheap, only on the console."""
        if self._console is not None:
            self._console.progress(progress)

    def note(self, message: str) -> None:
        """Print a message without secrets; on stderr if the pipeline has no console."""
        message = self._hide(message)
        if self._console is not None:
            self._console.note(message)
        else:
            self._to_stderr(message)

    def warn(self, message: str) -> None:
        """Print a warning as a note, also of a run that prints nothing else."""
        if self._console is not None and self._console.is_quiet:
            self._to_stderr(self._hide(message))
        else:
            self.note(message)

    @staticmethod
    def _to_stderr(message: str) -> None:
        with suppress(OSError):  # stderr may be closed
            print(message, file=sys.stderr, flush=True)

    def close(self, ok: bool) -> None:
        """Close all trackers, even if one fails; then raises the first OSError."""
        self.timeline.close()
        failure: OSError | None = None
        for tracker in reversed(self._trackers):
            try:
                tracker.close(ok)
            except OSError as error:
                failure = failure or error
        if failure is not None:
            raise failure

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close(ok=error is None)
        except OSError as failure:
            # Keep the exception that ended the run.
            if error is None:
                raise
            self.note(str(failure))


def open_trackers(
    asked: Sequence[TrackerSpec],
    *,
    run_dir: Path,
    run_name: str,
    config: Mapping[str, object],
    total_steps: int,
    resumed_step: int | None,
    shown_samples: int = 0,
    folder: Path | None = None,
    verbosity: Verbosity = Verbosity.NORMAL,
) -> Trackers:
    """Open metrics.jsonl, the timeline, and the trackers that are `asked` for.

    `folder` holds the user's modules. `config` is the resolved pipeline as plain YAML values; likely secrets in it are
    hidden. `resumed_step` is the last step to keep, None for a new run: later steps are removed from the files.
    `shown_samples` rows of each validation are shown as a table. `verbosity` is that of the console. Raises OSError if
    a file cannot be written, and ValueError for a user's tracker that cannot be made.
    """
    console = Console(total_steps, verbosity=verbosity) if any(spec.tracker == "console" for spec in asked) else None
    trackers: list[Tracker] = [MetricsFile()]
    together = Trackers(trackers, Timeline(), console, run_dir / "samples", shown_samples, hiding(config))
    if console is not None:
        trackers.append(console)
    trackers += [_made(spec, run_name, together.note, folder) for spec in asked if spec.tracker != "console"]
    config = without_secrets(config)
    with ExitStack() as on_failure:
        on_failure.callback(together.close, ok=False)
        together.timeline.start(run_dir, resumed_step)
        for tracker in trackers:
            tracker.start(run_dir, config, resumed_step)
        on_failure.pop_all()
    return together


def _made(spec: TrackerSpec, run_name: str, note: Callable[[str], None], folder: Path | None) -> Tracker:
    name = spec.name or run_name
    match spec.tracker:
        case "tensorboard":
            return TensorBoard()
        case "wandb":
            return Wandb(name, note, spec)
        case "mlflow":
            return BackgroundTracker("mlflow", Mlflow(name, note, spec), note)
        case "swanlab":
            return BackgroundTracker("swanlab", SwanLab(name, note, spec), note)
        case own:
            return BackgroundTracker(own, OwnTracker(own, spec.args, folder), note)


_COLUMNS = ("data_set", "data_source", "prompt", "demonstration", "response", "answer", "reward")


def read_samples(path: Path, limit: int) -> SampleTable | None:
    """At most `limit` rows of a samples file, spread over its data sets and prompts; None if there is no file.

    The same rows in each validation. Raises OSError or ValueError if the file cannot be read.
    """
    import pyarrow.parquet as pq

    if not limit or not path.is_file():
        return None
    with pq.ParquetFile(path) as file:
        columns = [name for name in _COLUMNS if name in file.schema_arrow.names]
        rows = [tuple(row[name] for name in columns) for row in file.read(columns=columns).to_pylist()]
    by_set: dict[str, list[tuple]] = {}
    for row in rows:
        by_set.setdefault(row[0], []).append(row)
    counts: dict[str, int] = {}
    # Smallest sets first, so that others can use the rest.
    for left, name in zip(range(len(by_set), 0, -1), sorted(by_set, key=lambda name: len(by_set[name])), strict=True):
        counts[name] = min(len(by_set[name]), (limit - sum(counts.values())) // left)
    chosen = [row for name, of_set in by_set.items() for row in _spread(of_set, counts[name])]
    return SampleTable(tuple(columns), tuple(chosen))


def _spread(rows: list[tuple], count: int) -> list[tuple]:
    return [rows[place * len(rows) // count] for place in range(count)]
