"""Watches the metrics of a run: reports alarms, calls the user's command, and notes what ends the run."""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import Callable, Mapping, Sequence

from dagrl.config.schema.alarms import STOPS, WARNINGS
from dagrl.orchestrator.folder.run_folder import RunFolder
from dagrl.orchestrator.groups.task_group import run_in_daemon_thread
from dagrl.orchestrator.steps.record import without_metric
from dagrl.tracking.alarms import Alarm, Alarms
from dagrl.tracking.metrics_file import kept_lines
from dagrl.validation.prepare import PreparedPipeline

_COMMAND_S = 60.0
"""Longest duration of the user's command."""


class AlarmWatch:
    """The alarms of one run."""

    def __init__(self, prepared: PreparedPipeline, folder: RunFolder, warn: Callable[[str], None]) -> None:
        """Continues after the step that the run folder resumes from."""
        pipeline = prepared.loaded.pipeline
        run = pipeline.run
        self._alarms = Alarms(run)
        path, start = folder.path / "metrics.jsonl", folder.start.step
        for line in kept_lines(path, start) if start and path.is_file() else ():
            metrics = json.loads(line)
            self._alarms.look(metrics["step"], metrics)
        own = [condition for condition in (*run.warnings, *run.stops) if condition.text not in (*WARNINGS, *STOPS)]
        # The metrics of a part of a pipeline are in two runs.
        self._unseen = {condition.metric for condition in own} if prepared.part is None else set()
        """Metrics that the user names, until a step has had them or a message has said that it has not."""
        self._command, self._about = run.alarm_command, {"name": pipeline.name, "run": str(folder.path.resolve())}
        self._warn, self._validates = warn, prepared.plan.validates
        self._calls: set[asyncio.Task[None]] = set()
        self.stopped_by: Alarm | None = None
        """The first alarm that ends the run."""

    def look(self, step: int, metrics: Mapping[str, float]) -> list[Alarm]:
        """Report the alarms of a step, whose metrics are in metrics.jsonl, and return them."""
        self._note_missing(step, metrics)
        # While the run ends, what ends it is no news.
        alarms = [alarm for alarm in self._alarms.look(step, metrics) if alarm.begins or self.stopped_by is None]
        for alarm in alarms:
            ends = "; the run ends, with a checkpoint" if alarm.stops else ""
            self._warn(f"step {step}: {alarm}{ends}")
            if alarm.stops:
                self.stopped_by = self.stopped_by or alarm
            if self._command is not None:
                call = asyncio.ensure_future(self._call(self._command, alarm))
                self._calls.add(call)
                call.add_done_callback(self._calls.discard)
        return alarms

    async def join(self) -> None:
        """Wait for the commands that are running."""
        if self._calls:
            await asyncio.wait(self._calls)

    def _note_missing(self, step: int, metrics: Mapping[str, float]) -> None:
        for name in sorted(self._unseen):
            if name in metrics:
                self._unseen.discard(name)
            elif step and (self._validates(step) or not name.startswith("val/")):
                self._unseen.discard(name)
                self._warn(without_metric("run.warn_when and run.stop_when", step, name, metrics))

    async def _call(self, command: Sequence[str], alarm: Alarm) -> None:
        about = {
            **self._about,
            "step": alarm.step,
            "metric": alarm.condition.metric,
            "value": alarm.value,
            "usual": alarm.usual,
            "condition": alarm.condition.text,
            "stops": alarm.stops,
            "message": str(alarm),
        }
        why = await run_in_daemon_thread(_run, command, json.dumps(about))
        if why:
            self._warn(f"run.alarm_command: {command[0]} {why}")


def _run(command: Sequence[str], text: str) -> str:
    """Run a command with a text on its standard input. Returns how it failed; empty if it did not."""
    try:
        status = _status(command, text)
    except subprocess.TimeoutExpired:
        return f"took more than {_COMMAND_S:g} s, and was killed"
    except (OSError, ValueError) as error:
        return f"cannot be started: {getattr(error, 'strerror', None) or error}"
    return f"exited with {status}" if status else ""


def _status(command: Sequence[str], text: str) -> int:
    return subprocess.run(
        command,
        input=text,
        text=True,
        # Not the terminal's, whose table it would disturb.
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        timeout=_COMMAND_S,
        check=False,
        # Ctrl-C is for the run.
        start_new_session=True,
    ).returncode
