"""Reads the folder of a run, which may still grow; each read covers only new lines."""

from __future__ import annotations

import json
import os
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import yaml

from dagrl.backends.fit import Placement, place
from dagrl.backends.planning.gpus import gpu_of_driver
from dagrl.config.loading.loader import LoadedPipeline, load_pipeline
from dagrl.config.schema import Pipeline
from dagrl.graph.dag import Graph
from dagrl.orchestrator.folder.run_folder import graph_of_run
from dagrl.scheduler.intervals import Activity, Interval
from dagrl.scheduler.plan import HOST, Plan
from dagrl.tracking.alarms import Alarm, alarms_of
from dagrl.tracking.run_file import run_file, run_text
from dagrl.tracking.run_notes import section
from dagrl.tracking.timeline import parse_activities

_PAUSE_S, _PAUSE_STEPS = 20.0, 5.0
"""Minimum of a pause between two starts of a run, in seconds and in median steps."""


class RunReader:
    """Metrics and activities of a run. `refresh` reads new ones."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.steps: list[dict[str, float]] = []
        """Numeric metrics of each step in order, including ``step``."""
        self.spans: list[Activity] = []
        """Activities in the order of their starts."""
        self.torn = 0
        self._metrics = Tail(folder, "metrics.jsonl")
        self._timeline = Tail(folder, "timeline.json")
        self.groups: list[str] = []
        self._of_step: dict[int, list[Activity]] = defaultdict(list)
        self._starts: list[float] = []
        self._longest = 0.0
        self.step_seconds: dict[int, float] = {}
        """Step -> its ``time/step_s``."""
        self._pipeline: RunPipeline | None = None
        self._changed = 0

    @property
    def last_step(self) -> int:
        """The newest finished step; 0 without any."""
        return int(self.steps[-1]["step"]) if self.steps else 0

    @property
    def by_step(self) -> dict[int, dict[str, float]]:
        """Step -> its metrics."""
        return {int(line["step"]): line for line in self.steps}

    def of(self, name: str) -> list[float]:
        return [line[name] for line in self.steps if isinstance(line.get(name), int | float)]

    def in_training(self, name: str) -> list[float]:
        """The metrics without the validation before the first step, which is step 0."""
        return [line[name] for line in self.steps if line["step"] > 0 and isinstance(line.get(name), int | float)]

    @property
    def generation(self) -> int:
        """Changes if earlier steps are no longer part of the run, because it returned to a checkpoint."""
        return self._metrics.generation

    @property
    def is_writing(self) -> bool:
        """Whether metrics.jsonl ended within a line, because the run is writing it, or was killed."""
        return self._metrics.unfinished

    def refresh(self) -> None:
        """Read new lines. ValueError if timeline.json is not a run's; OSError if a file cannot be read."""
        self._refresh_metrics()
        before = self._timeline.generation
        lines = self._timeline.new_lines()
        if self._timeline.generation != before:
            self.spans, self._of_step = [], defaultdict(list)
        if new := parse_activities(lines, self.folder / "timeline.json"):
            self.spans = sorted([*self.spans, *new], key=lambda span: span.start)
            self._starts = [span.start for span in self.spans]
            self.groups = sorted({span.group for span in self.spans})
            self._longest = max(span.end - span.start for span in self.spans)
            for span in new:
                self._of_step[span.step].append(span)

    def pipeline(self) -> RunPipeline:
        """The run's pipeline, read again if it has changed. PipelineError, ValueError as `pipeline_of_run`."""
        path = self.folder / "pipeline.yaml"
        changed = path.stat().st_mtime_ns if path.is_file() else 0
        if self._pipeline is None or changed != self._changed:
            self._pipeline, self._changed = pipeline_of_run(self.folder), changed
        return self._pipeline

    def alarms(self) -> list[Alarm]:
        """The alarms of the run's steps by the conditions of its pipeline, each when it begins."""
        return alarms_of(self.steps, section(config_of(self.folder), "run"))

    @property
    def known_steps(self) -> int | None:
        """Requested steps of the run; None if unknown."""
        try:
            return self.pipeline().loaded.pipeline.run.known_steps
        except ValueError:
            return None

    @property
    def plan(self) -> Plan | None:
        """The plan of the pipeline; None if the pipeline cannot be read or placed."""
        try:
            return self.pipeline().plan
        except ValueError:
            return None

    @property
    def timed_steps(self) -> list[int]:
        return sorted(self._of_step)

    def window(self, step: int) -> Interval | None:
        """Start and end of a step, in seconds since the epoch; None if the timeline lacks it."""
        activities = self._of_step.get(step)
        return step_window(activities, self.step_seconds.get(step, 0.0)) if activities else None

    def commit_interval(self, step: int) -> Interval | None:
        """From the previous commit to the step's own, which is the time of a step if steps overlap."""
        window, seconds = self.window(step), self.step_seconds.get(step)
        return window and (Interval(window.end - seconds, window.end) if seconds else window)

    def within(self, window: Interval) -> list[Activity]:
        """Activities of any step that overlap with a window, in the order of their starts."""
        if not self.spans:
            return []
        first = bisect_left(self._starts, window.start - self._longest)
        last = bisect_right(self._starts, window.end)
        return [span for span in self.spans[first:last] if span.end > window.start and span.start < window.end]

    def pauses(self) -> list[tuple[int, float]]:
        """(step, seconds): pauses after a step in which the run was stopped, longer than any step would explain."""
        windows = [(step, window) for step in self.timed_steps if (window := self.window(step)) is not None]
        if len(windows) < 2:
            return []
        usual = median(window.end - window.start for _, window in windows)
        shortest = max(_PAUSE_S, _PAUSE_STEPS * usual)
        pauses, covered = [], windows[0][1].end
        for (before, _), (_, window) in pairwise(windows):
            if window.start - covered > shortest:
                pauses.append((before, window.start - covered))
            covered = max(covered, window.end)
        return pauses

    def _refresh_metrics(self) -> None:
        before = self._metrics.generation
        lines = self._metrics.new_lines()
        if self._metrics.generation != before:
            self.steps, self.torn = [], 0
        new = [parse_step(line) for line in lines]
        self.torn += new.count(None)
        self.steps += [step for step in new if step is not None]
        self.steps.sort(key=lambda step: step["step"])
        self.step_seconds = {
            step: line["time/step_s"] for step, line in self.by_step.items() if line.get("time/step_s")
        }


def step_window(activities: Sequence[Activity], seconds: float) -> Interval:
    """Start and end of a step with these activities.

    It starts with its first activity on an engine, or `seconds` before its end, at the previous commit, whichever is
    earlier. The host reads prompts ahead.
    """
    end = max(activity.end for activity in activities)
    on_engines = [activity for activity in activities if activity.group != HOST]
    start = min(activity.start for activity in on_engines or activities)
    return Interval(min(start, end - seconds), end)


def is_run(folder: Path) -> bool:
    return (folder / "pipeline.yaml").is_file() or (folder / "metrics.jsonl").is_file()


def open_run(folder: Path) -> RunReader:
    """Read a run. ValueError if the folder holds no run, or cannot be read."""
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder; name the run folder, by default runs/NAME")
    if not is_run(folder):
        raise ValueError(f"{folder} holds neither pipeline.yaml nor metrics.jsonl: no run has written there")
    run = RunReader(folder)
    run.refresh()
    return run


def read_run(folder: Path) -> RunReader:
    """Read a run with metrics. ValueError like `open_run`, and without metrics."""
    run = open_run(folder)
    if not (folder / "metrics.jsonl").is_file():
        raise ValueError(f"{folder} holds no metrics.jsonl: its run has not finished a step")
    run.torn += run.is_writing
    return run


_LARGEST = 1 << 1000


def parse_step(line: str) -> dict[str, float] | None:
    """The numbers of a line of metrics.jsonl, including ``step``; None if it is torn."""
    try:
        step = json.loads(line)
        number = int(step["step"])
    except (ValueError, KeyError, TypeError, OverflowError):
        return None
    return {name: value for name, value in step.items() if _is_number(value)} | {"step": number}


def config_of(folder: Path) -> dict[str, object]:
    """The pipeline of a run as plain values; empty if it cannot be read."""
    try:
        tree = yaml.safe_load(run_text(folder, "pipeline.yaml") or "")
    except yaml.YAMLError:
        return {}
    return tree if isinstance(tree, dict) else {}


def _is_number(value: Any) -> bool:
    """Whether it is a number for floating-point arithmetic, including NaN and infinity."""
    return isinstance(value, float) or (isinstance(value, int) and abs(value) < _LARGEST)


_CHUNK = 1 << 24
"""Bytes of a read, so that a file of gigabytes is not in memory twice."""


class Tail:
    """Lines of a file, each once. It starts over if the file is replaced, or is shorter than before."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder, self._name = folder, name
        self._identity: tuple[int, int] | None = None
        self._offset = 0
        self.generation = 0
        """Counts the times that earlier lines became invalid."""
        self.unfinished = False
        """Whether the file ended within a line when it was read."""

    def new_lines(self) -> list[str]:
        """Complete lines added since the last call; empty without a file.

        ValueError as in `run_file`, OSError if it cannot be read.
        """
        path = run_file(self._folder, self._name)
        if path is None:
            self._start_over(None)
            return []
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            identity = (status.st_dev, status.st_ino)
            if identity != self._identity or status.st_size < self._offset:
                self._start_over(identity)
            file.seek(self._offset)
            lines: list[str] = []
            rest = b""
            while chunk := file.read(_CHUNK):
                *whole, rest = (rest + chunk).split(b"\n")
                lines += (line.decode(errors="replace") for line in whole)
                self._offset += sum(len(line) + 1 for line in whole)
        self.unfinished = bool(rest)
        # The last line of a timeline is its closing bracket, which the next event replaces.
        if lines and lines[-1] == "]":
            lines.pop()
            self._offset -= len("]\n")
        return lines

    def _start_over(self, identity: tuple[int, int] | None) -> None:
        if self._identity is not None:
            self.generation += 1
        self._identity, self._offset = identity, 0


@dataclass(frozen=True, eq=False)
class RunPipeline:
    """A run's pipeline. Its graph and plan raise PipelineError if the contract of a node is unknown."""

    folder: Path
    loaded: LoadedPipeline

    @cached_property
    def graph(self) -> Graph:
        return graph_of_run(self.folder, self.loaded)

    @cached_property
    def _placement(self) -> Placement:
        return place(self.loaded.pipeline, self.graph)

    @property
    def pipeline(self) -> Pipeline:
        """The pipeline with ``sleep: auto`` decided."""
        return self._placement.pipeline

    @property
    def plan(self) -> Plan:
        return self._placement.plan

    @cached_property
    def on_its_gpus(self) -> Pipeline:
        """The pipeline; groups without named GPUs have the ones that the run's workers reported."""
        groups = dict(self.pipeline.groups)
        workers = json.loads(run_text(self.folder, "workers.json") or "{}")
        for worker, entry in workers.items():
            executor = self.plan.executors.get(worker.partition("/")[0])
            gpu = gpu_of_driver(entry.get("gpu", ""))
            if executor and executor.group and gpu and not self.pipeline.groups[executor.group].gpu:
                groups[executor.group] = groups[executor.group].model_copy(update={"gpu": gpu.name})
        return self.pipeline.model_copy(update={"groups": groups})


def pipeline_of_run(folder: Path, overrides: Sequence[str] = ()) -> RunPipeline:
    """Load the pipeline of a run, with overrides. PipelineError if it is wrong; ValueError if there is none."""
    path = run_file(folder, "pipeline.yaml")
    if path is None:
        raise ValueError(f"{folder} holds no pipeline.yaml")
    return RunPipeline(folder, load_pipeline(path, overrides))
