"""Plans put together by hand, and the event that ends each command."""

from __future__ import annotations

from dataclasses import replace

from dagrl.config.coordinates import Coordinates
from dagrl.config.schema import Scope
from dagrl.scheduler.plan import Executor, PlannedTask, Rows

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
