"""Plans put together by hand, and the event that ends each command."""

from __future__ import annotations

from dataclasses import replace

from dagrl.plan.commands import (
    Command,
    Commit,
    EngineReady,
    Event,
    Restart,
    Run,
    RunDone,
    Save,
    Sleep,
    StateSaved,
    StepCommitted,
    Sync,
    Wake,
    WeightsSynced,
)
from dagrl.plan.coordinates import Coordinates
from dagrl.plan.plan import Executor, PlannedTask, Rows
from dagrl.spec.ops import Scope
from dagrl.spec.residency import Residency

ONE_RANK = (Coordinates(0, 0, 0, 0, primary=True),)


def executor(name: str, group: str, **fields) -> Executor:
    return Executor(name, group, ONE_RANK, (name,), **fields)


def task(name: str, executor: str, *reads: str, scope: Scope = Scope.ROW, **fields) -> PlannedTask:
    inputs = {f"from_{need}": (need, need) for need in reads}
    return PlannedTask(name, name, name, executor, scope, Rows.TRAIN, inputs=inputs, **fields)


def for_validation(tasks: list[PlannedTask], *names: str) -> list[PlannedTask]:
    return [
        replace(
            each,
            name=f"val/{each.name}",
            rows=Rows.VALIDATION,
            inputs={column: (f"val/{need}", column) for column, (need, _) in each.inputs.items()},
        )
        for each in tasks
        if each.name in names
    ]


def event_of(command: Command) -> Event:
    match command:
        case Run():
            return RunDone(command)
        case Sync():
            return WeightsSynced(command)
        case Sleep(_, executor, residency) | Wake(_, executor, residency):
            return EngineReady(executor, residency)
        case Restart(_, executor):
            return EngineReady(executor, Residency.AWAKE)
        case Save():
            return StateSaved(command)
        case Commit():
            return StepCommitted(command)
