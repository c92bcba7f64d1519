"""Reactions of a run to lost workers: workers of generators and servers are restarted, as often as the policy allows.
A worker that has lost only its server keeps its process, and with it tools, environments and programs.

docs/schedule.md follows the death of a server through the functions of the driver.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from itertools import takewhile

from dagrl.orchestrator.groups.elastic import ElasticGroups
from dagrl.orchestrator.groups.worker_group import WorkerGroups
from dagrl.scheduler.commands import Command, Event, Run, WorkerLost
from dagrl.scheduler.plan import HOST, Plan, WorkerId
from dagrl.workers.errors import RunError, WorkerHungError, WorkerLostError


class RestartPolicy:
    """Counts the restarts of one `dagrl run`, of single workers and of the whole run: they share one budget."""

    def __init__(self, max_restarts: int) -> None:
        self._max = max_restarts
        self.count = 0
        self._refused: WorkerLostError | None = None
        self.has_run = False
        """Whether all workers have started once. A failure before that would repeat itself."""

    def use_restart(self, failure: WorkerLostError, what: str) -> str:
        """Use one restart for `what`; returns a note for the user. Raises `failure` if the budget is spent."""
        if not self.has_run or self.count == self._max:
            # Count the failure only once: a refusal for a single worker also applies to the whole run.
            if self.count and failure is not self._refused:
                failure.hint = (
                    f"this was after {self.count} restart{'s' * (self.count > 1)}, as many as run.max_restarts allows"
                    + (f"; {failure.hint}" if failure.hint else "")
                )
            self._refused = failure
            raise failure
        self.count += 1
        # A worker that reports a failure of another one is not lost.
        state = "cannot go on" if failure.worker and not failure.lost else "is lost"
        worker = failure.worker or "a worker"
        return f"{worker} {state}: {failure.cause}; {what} (restart {self.count} of {self._max})"


class WorkerFailures:
    """Turns failures of commands into one `WorkerLost` event per executor, and restarts the lost workers."""

    def __init__(
        self,
        groups: WorkerGroups,
        plan: Plan,
        policy: RestartPolicy,
        timeout_s: float,
        running: Mapping[asyncio.Task[Event | None], Command],
        workers_of: Callable[[Command], tuple[str, ...]],
        elastic: ElasticGroups,
    ) -> None:
        self._groups, self._plan, self._policy, self._timeout_s = groups, plan, policy, timeout_s
        self._elastic = elastic
        self._running, self._workers_of = running, workers_of
        self._unreported: set[str] = set()
        """Executors with a loss that the scheduler does not know about yet. Commands that it begins on them until then
        would outlive the report.
        """
        self._lost: dict[str, set[int]] = {}
        """Executor -> ranks that were lost and not restarted."""
        self._killed: dict[str, set[int]] = {}
        """Executor -> those of them whose worker was killed."""

    async def handle(self, failure: WorkerLostError, note: Callable[[str], None]) -> WorkerLost | None:
        """The event for a failure that has ended a command. None if another command of the executor reports it.

        Raises the failure if the run cannot continue without these workers, or if the restart budget is spent. All
        other commands on the executor end first, so that none of them reports an event later.
        """
        executors = {worker.executor for worker in failure.lost}
        if len(executors) != 1 or not self._plan.restarts(*executors):
            raise failure
        (executor,) = executors
        lost, killed = set[int](), set[int]()
        for worker in failure.lost:
            ranks = self._plan.executors[executor].ranks_lost_with(worker.rank)
            if self._elastic.has_spared(executor, ranks):
                continue  # another command has failed with the same workers
            lost.update(ranks)
            if worker in failure.dead:
                killed.update(ranks)
                self._groups.kill_ranks(executor, ranks)
        spared = self._elastic.spare(executor, killed)
        needed = lost - killed if spared else lost
        if needed:
            self._lost.setdefault(executor, set()).update(needed)
            self._killed.setdefault(executor, set()).update(set() if spared else killed)
        names = ", ".join(map(str, failure.lost))
        if spared:
            note(f"{names} is lost: {failure.cause}; {executor} goes on without")
        if executor in self._unreported:
            return None
        if needed:
            note(self._policy.use_restart(failure, f"{executor} goes on when {names} is restarted"))
        self._unreported.add(executor)
        await self._join_others(executor)
        return WorkerLost(executor)

    def awaits_report(self, command: Command) -> bool:
        """Whether `command` must not begin, because the scheduler does not know yet that its workers are lost."""
        return not self._unreported.isdisjoint(self._workers_of(command))

    def report(self, events: Iterable[Event]) -> None:
        """The scheduler is about to handle `events`."""
        self._unreported -= {event.executor for event in events if isinstance(event, WorkerLost)}

    async def restart(self, executor: str) -> list[WorkerId]:
        """Restart the lost workers of an executor on their slots, and return them. Raises WorkerLostError.

        An elastic group has gone on without those that were killed.
        """
        ranks = sorted(self._lost.get(executor, ()))
        workers = [WorkerId(executor, rank) for rank in ranks]
        try:
            if ranks:
                await self._groups.start_again(executor, ranks, self._killed.get(executor, set()))
        except WorkerLostError:
            # Some may run, or be about to start.
            self._killed[executor] = {*ranks}
            self._groups.kill_ranks(executor, ranks)
            raise
        except RunError as error:
            # A restart of the whole run frees all resources.
            raise WorkerLostError(
                f"{', '.join(map(str, workers))} could not be restarted: {error.cause}",
                node=error.node,
                worker=error.worker,
                hint=error.hint,
                details=error.details,
            ) from error
        self._lost.pop(executor, None)
        self._killed.pop(executor, None)
        return workers

    async def _join_others(self, executor: str) -> None:
        current = asyncio.current_task()
        others = {task for task, command in self._running.items() if executor in self._workers_of(command)} - {current}
        if others and (await asyncio.wait(others, timeout=self._timeout_s))[1]:
            what = ", ".join(str(self._running[task]) for task in others if not task.done())
            raise WorkerHungError(f"waited {self._timeout_s:g} s for {what} to end, as {executor} has lost workers")


async def wait_for_earlier_runs(
    executor: str, plan: Plan, running: Mapping[asyncio.Task[Event | None], Command]
) -> None:
    """Wait for the runs on an executor that began before the current task. Raises the failure of the first one.

    If a run fails, the runs queued behind it fail too, and it has the cause.
    """
    if executor == HOST:  # CPU workers run tasks concurrently
        return
    current = asyncio.current_task()
    for task, command in takewhile(lambda entry: entry[0] is not current, list(running.items())):
        if isinstance(command, Run) and plan.task(command.task).executor == executor:
            await asyncio.wait([task])
            if not task.cancelled() and (failure := task.exception()):
                raise failure
