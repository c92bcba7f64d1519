"""Invariants of the scheduler's state, each calculated in another way than the scheduler does.

- Resources: what runs on each executor is what began and has not ended; a group does one thing at a time.
- Work: each shard of a task is waiting, ready, running or done, once, and follows from the shards that it needs.
- Staleness: no step is open, and no weights are used, that `Plan.max_staleness` forbids.
- Memory: engines that share devices are not awake together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from dagrl.config.residency import Residency
from dagrl.scheduler.commands import Command, Run, Save, Sleep, Sync, Wake
from dagrl.scheduler.history import History, SchedulerError
from dagrl.scheduler.open_steps import OpenSteps
from dagrl.scheduler.plan import HOST, Plan, Rows
from dagrl.scheduler.resources import ResourceTracker
from dagrl.scheduler.task_state import OpenStep, TaskState


def validate_state(
    plan: Plan,
    history: History,
    resources: ResourceTracker,
    steps: OpenSteps,
    residency: Callable[[str], Residency],
    version: Callable[[str], int | None],
) -> None:
    """Raises SchedulerError, with the story of the task or executor. The cost is that of all tasks of the open steps.

    `residency` and `version`: what each executor holds.
    """
    _validate_resources(plan, history, resources)
    _validate_memory(plan, history, residency)
    _validate_staleness(plan, history, steps, version)
    running: dict[tuple[int, str], list[Run]] = {}
    for command in history.under_way:
        if isinstance(command, Run):
            running.setdefault((command.step, command.task), []).append(command)
    for step, opened in steps.opened():
        undone = sum(progress.left > 0 for progress in opened.tasks.values())
        if undone != opened.left:
            raise SchedulerError(f"step {step} has {undone} tasks left, not {opened.left}", history.story(step=step))
        for name in opened.tasks:
            state = steps.tasks[name]
            if problem := _problem_of_task(state, step, opened, running):
                about = {name, state.task.executor, *(need.task.name for need in state.needs)}
                raise SchedulerError(f"{name} of step {step}: {problem}", history.story(about, step))


def _validate_resources(plan: Plan, history: History, resources: ResourceTracker) -> None:
    on: dict[str, set[Command]] = {name: set() for name in plan.executors}
    for command in history.under_way:
        for name in history.executors(command):
            on[name].add(command)
    busy: dict[str, list[str]] = {}
    for name, executor in plan.executors.items():
        tracked = set(resources.running(name))
        if tracked != on[name]:
            what = (
                "is held by a command that has ended" if tracked - on[name] else "runs a command that it does not hold"
            )
            raise SchedulerError(f"{name} {what}", history.story([name]))
        work = [command for command in on[name] if not isinstance(command, Sync)]
        # Two runs: one is queued behind the other.
        if len(work) > (executor.ranks if name == HOST else 2):
            raise SchedulerError(f"{name} runs {len(work)} commands at a time", history.story([name]))
        if executor.group is not None and work:
            busy.setdefault(executor.group, []).append(name)
    for group, names in busy.items():
        moves = {type(command) for name in names for command in on[name] if not isinstance(command, Sync)}
        if len(names) > 1 and moves not in ({Sleep}, {Wake}):
            raise SchedulerError(f"{' and '.join(names)} work at a time on group {group}", history.story(names))


def _validate_memory(plan: Plan, history: History, residency: Callable[[str], Residency]) -> None:
    sleepers: dict[str | None, list[str]] = {}
    for name, executor in plan.executors.items():
        if executor.sleeps:
            sleepers.setdefault(executor.group, []).append(name)
    for group, names in sleepers.items():
        held = [name for name in names if residency(name) is not Residency.ASLEEP]
        if len(held) > 1 and any(residency(name) is Residency.AWAKE for name in held):
            raise SchedulerError(f"{' and '.join(held)} share the memory of {group} awake", history.story(held))
    for command in history.under_way:
        if isinstance(command, Run | Save):
            (name,) = history.executors(command)
            if residency(name) is not Residency.AWAKE:
                raise SchedulerError(f"{name} works while it is {residency(name).name}", history.story([name]))


def _validate_staleness(plan: Plan, history: History, steps: OpenSteps, version: Callable[[str], int | None]) -> None:
    opened = dict(steps.opened())
    for step in opened:
        if step < max(opened) - plan.max_staleness and opened[step].left > opened[step].ending:
            cause = f"step {max(opened)} is open, while step {step} has work that has not begun"
            raise SchedulerError(cause, history.story(step=step))
    coming = {each.follower: each.version for each in history.under_way if isinstance(each, Sync)}
    for run in history.under_way:
        if not isinstance(run, Run):
            continue
        (name,) = history.executors(run)
        if plan.executors[name].weights_from is None:
            continue
        held, task = version(name), steps.tasks[run.task].task
        found = max((each for each in (held, coming.get(name)) if each is not None), default=None)
        oldest = run.step if task.rows is Rows.VALIDATION else max(0, run.step - 1 - plan.max_staleness)
        if found is None or found < oldest:
            cause = f"{run.task} of step {run.step} runs on version {found} of {name}; the oldest allowed is {oldest}"
            raise SchedulerError(cause, history.story([name]))


def _problem_of_task(
    state: TaskState, step: int, opened: OpenStep, running: Mapping[tuple[int, str], list[Run]]
) -> str:
    """Describe the broken invariant of a task in an open step; empty if there is none."""
    # A rollout may end after its round, whose last shard it has reported before.
    round_ = state.round_in(step)
    progress = opened.tasks[state.task.name]
    runs = [run for run in running.get((step, state.task.name), ()) if run.round == round_]
    begun = [shard for run in runs for shard in run.shards]
    if len(begun) != len(set(begun)):
        return "a shard runs twice at a time"
    done = progress.done()
    lacking = progress.shards - done - set(begun)
    for need in state.needs:
        supplied = opened.tasks[need.task.name].done()
        if state in need.queued_readers:
            supplied |= {shard for run in running.get((step, need.task.name), ()) for shard in run.shards}
        lacking &= supplied
    ready = _next_of(state.order.pieces, done, lacking, bool(runs)) if state.order.pieces else lacking
    if (tracked := progress.ready_shards()) != ready:
        forgotten, early = ready - tracked, tracked - ready
        shards = ", ".join(map(str, sorted(forgotten or early)))
        return f"shards {shards} " + ("are ready, but do not wait to run" if forgotten else "wait to run, but may not")
    if ready and not state.is_marked(step):
        return "it is ready, but no longer in the queue"
    return ""


def _next_of(pieces: Iterable[tuple[int, ...]], done: set[int], ready: set[int], runs: bool) -> set[int]:
    """The shards of the next piece, if it has all inputs and no piece is running."""
    piece = next((left for piece in pieces if (left := set(piece) - done)), set[int]())
    return piece if not runs and piece <= ready else set()
