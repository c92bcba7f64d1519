"""The driver's reaction to alarms."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from dagrl.config.schema import Pipeline
from dagrl.orchestrator.alarms import AlarmWatch

_SAY = "import sys; open(sys.argv[1], 'a').write(sys.stdin.read() + chr(10))"


class Watched:
    """A run with `warn_when` and `stop_when` on the metrics ``a`` and ``b``."""

    def __init__(self, lab, folder: Path, start: int = 0, **run) -> None:
        pipeline = lab.tiny_pipeline()
        pipeline["run"] |= {"warn_when": ["a > 1 for 2"], "stop_when": ["b > 1"], **run}
        loaded = SimpleNamespace(pipeline=Pipeline.model_validate(pipeline))
        prepared = SimpleNamespace(loaded=loaded, part=None, plan=SimpleNamespace(validates=lambda step: step == 3))
        self.warnings: list[str] = []
        run_folder = SimpleNamespace(path=folder, start=SimpleNamespace(step=start))
        self.watch = AlarmWatch(prepared, run_folder, self.warnings.append)  # type: ignore[arg-type]

    def look(self, *steps: dict[str, float], first: int = 1) -> None:
        async def look() -> None:
            for step, metrics in enumerate(steps, first):
                self.watch.look(step, metrics)
            await self.watch.join()

        asyncio.run(look())


def test_a_warning_is_said_when_it_begins_and_a_stop_while_the_run_goes_on(lab, tmp_path) -> None:
    watched = Watched(lab, tmp_path)
    watched.look({"a": 2, "b": 0}, {"a": 2, "b": 3}, {"a": 2, "b": 4})
    assert watched.warnings == [
        "step 2: a is 2 (run.warn_when: a > 1 for 2)",
        "step 2: b is 3 (run.stop_when: b > 1); the run ends, with a checkpoint",
    ]
    assert watched.watch.stopped_by is not None and watched.watch.stopped_by.step == 2


def test_a_resumed_run_stops_again_while_the_cause_lasts(lab, tmp_path) -> None:
    lines = [{"step": 1, "a": None, "b": 0}, {"step": 2, "a": 2, "b": 2}, {"step": 3, "a": 0, "b": 0}]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    watched = Watched(lab, tmp_path, start=2)
    watched.look({"a": 2, "b": 2}, first=3)
    assert [warning.partition(" is ")[0] for warning in watched.warnings] == ["step 3: a", "step 3: b"]


def test_a_metric_that_no_step_has_is_said_once_if_it_is_named(lab, tmp_path) -> None:
    conditions = ["grad_nrm > 1", "val/reward/mean < 1", "entropy < 0.01 for 3"]
    watched = Watched(lab, tmp_path, validate_every=3, warn_when=conditions, stop_when=[])
    watched.look({"grad_norm": 1}, {"grad_norm": 1}, {"val/reward/max": 1})
    assert watched.warnings == [
        "run.warn_when and run.stop_when: step 1 has no metric grad_nrm; did you mean `grad_norm`?",
        "run.warn_when and run.stop_when: step 3 has no metric val/reward/mean; did you mean `val/reward/max`?",
    ]


def test_a_command_gets_each_alarm(lab, tmp_path) -> None:
    told = tmp_path / "told.jsonl"
    watched = Watched(lab, tmp_path, alarm_command=[sys.executable, "-c", _SAY, str(told)])
    watched.look({"a": 2}, {"a": 2}, {"b": 2})
    calls = {call["metric"]: call for call in map(json.loads, told.read_text().splitlines())}
    assert calls["a"] == {
        "name": "tiny",
        "run": str(tmp_path),
        "step": 2,
        "metric": "a",
        "value": 2,
        "usual": None,
        "condition": "a > 1 for 2",
        "stops": False,
        "message": "a is 2 (run.warn_when: a > 1 for 2)",
    }
    assert calls["b"]["stops"] and len(calls) == 2


@pytest.mark.parametrize(
    ("command", "why"),
    [
        (["/no/such/program"], "/no/such/program cannot be started: No such file or directory"),
        (["/bin/sh", "-c", "exit 3"], "/bin/sh exited with 3"),
        (["/bin/sleep", "9"], "/bin/sleep took more than 0.1 s, and was killed"),
        (["a\0b"], "a\0b cannot be started: embedded null byte"),
    ],
)
def test_a_command_that_fails_is_a_warning(lab, tmp_path, monkeypatch, command, why) -> None:
    if "sleep" in command[0]:
        monkeypatch.setattr("dagrl.orchestrator.alarms._COMMAND_S", 0.1)
    watched = Watched(lab, tmp_path, alarm_command=command)
    watched.look({"b": 2})
    assert watched.warnings[-1] == f"run.alarm_command: {why}"
