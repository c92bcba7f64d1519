"""The state of a task: its progress in each open step, its ready steps, and the tasks that wait for it.

The cost of an update depends on its shards, not on the number of others.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from heapq import heappop, heappush

from dagrl.config.schema import Scope
from dagrl.scheduler.commands import Run
from dagrl.scheduler.plan import Executor, Plan, PlannedTask


class _Progress:
    """One task in one step."""

    __slots__ = ("_done", "left")

    def __init__(self, shards: int) -> None:
        self.left = shards
        """Shards that are not done."""
        self._done = bytearray(shards)

    @property
    def shards(self) -> set[int]:
        return set(range(len(self._done)))

    def done(self) -> set[int]:
        return {shard for shard, done in enumerate(self._done) if done}

    def finish(self, shards: Iterable[int]) -> list[int]:
        """Mark `shards` as done; returns the newly done ones."""
        done = self._done
        new = [shard for shard in shards if not done[shard]]
        for shard in new:
            done[shard] = True
        self.left -= len(new)
        return new


class ShardByShard(_Progress):
    """Shards run once they are ready: one by one in order, or all ready ones together."""

    __slots__ = ("_lacking", "_to_start", "_together", "_waiting")

    def __init__(self, shards: int, needs: int, *, together: bool = False) -> None:
        """`together`: a run takes all ready shards."""
        super().__init__(shards)
        self._lacking = [needs] * shards
        self._to_start = shards
        self._together = together
        self._waiting: list[int] = [] if needs else list(range(shards))
        """Heap of the ready shards that have not started."""

    @property
    def ready(self) -> bool:
        """Whether shards with all inputs wait to be started."""
        return bool(self._waiting)

    def ready_shards(self) -> set[int]:
        """The shards that could be started now."""
        return set(self._waiting)

    @property
    def next(self) -> tuple[int, ...]:
        return tuple(sorted(self._waiting)) if self._together else (self._waiting[0],)

    @property
    def takes_rest(self) -> bool:
        """Whether no shards remain after `next` that could run together with them."""
        return (len(self._waiting) if self._together else 1) == self._to_start

    def start(self) -> None:
        self._to_start -= len(self._waiting) if self._together else 1
        if self._together:
            self._waiting.clear()
        else:
            heappop(self._waiting)

    def supply(self, shards: Iterable[int]) -> None:
        """One of this task's inputs has finished `shards`."""
        lacking = self._lacking
        for shard in shards:
            lacking[shard] -= 1
            if not lacking[shard]:
                heappush(self._waiting, shard)

    def give_back(self, shards: Iterable[int]) -> None:
        """A run of `shards` has failed: unfinished ones must start again."""
        for shard in shards:
            if not self._done[shard]:
                self._to_start += 1
                heappush(self._waiting, shard)


class PieceByPiece(_Progress):
    """The shards of a piece run together, one piece after the other. A whole batch is one piece."""

    __slots__ = ("_lacking", "_left_of_piece", "_piece", "_piece_of", "_pieces", "_running")

    takes_rest = True

    def __init__(self, shards: int, needs: int, pieces: tuple[tuple[int, ...], ...], piece_of: list[int]) -> None:
        """`piece_of`: the piece of each shard."""
        super().__init__(shards)
        self._pieces, self._piece_of = pieces, piece_of
        self._lacking = [len(piece) * needs for piece in pieces]
        self._piece = 0
        self._left_of_piece = len(pieces[0])
        self._running = False

    @property
    def ready(self) -> bool:
        """Whether the next piece has all inputs and the previous one has ended."""
        return not self._running and self._piece < len(self._pieces) and not self._lacking[self._piece]

    def ready_shards(self) -> set[int]:
        """The shards that could be started now."""
        return set(self.next) if self.ready else set()

    @property
    def next(self) -> tuple[int, ...]:
        """The rest of the next piece."""
        piece = self._pieces[self._piece]
        if self._left_of_piece == len(piece):
            return piece
        return tuple(shard for shard in piece if not self._done[shard])

    def start(self) -> None:
        self._running = True

    def supply(self, shards: Iterable[int]) -> None:
        for shard in shards:
            self._lacking[self._piece_of[shard]] -= 1

    def give_back(self, shards: Iterable[int]) -> None:
        self._running = False

    def finish(self, shards: Iterable[int]) -> list[int]:
        new = super().finish(shards)
        self._left_of_piece -= len(new)
        if new and not self._left_of_piece:
            self._running = False
            self._piece += 1
            self._left_of_piece = len(self._pieces[self._piece]) if self._piece < len(self._pieces) else 0
        return new


TaskProgress = ShardByShard | PieceByPiece


class ShardOrder:
    """The order in which a task processes the shards of a step."""

    def __init__(self, task: PlannedTask, shards: int, needs: int) -> None:
        """`needs`: the number of tasks that it waits for."""
        self._shards, self._needs = shards, needs
        # An engine runs one task at a time, and each run has a cost: a call to every rank, swapping weights.
        # CPU workers process shards in parallel.
        self._together = task.engine is not None
        self.pieces = task.pieces
        if not task.pieces and (task.streams or task.trains or task.scope is Scope.BATCH):
            self.pieces = (tuple(range(shards)),)
        places = {shard: place for place, piece in enumerate(self.pieces) for shard in piece}
        in_pieces = len(places) == shards == sum(len(piece) for piece in self.pieces) and all(self.pieces)
        assert not self.pieces or in_pieces, f"the pieces of {task.name} are not each shard once"
        self._piece_of = [places[shard] for shard in range(shards)] if places else []

    @property
    def last_piece(self) -> tuple[int, ...]:
        return self.pieces[-1]

    def begin(self) -> TaskProgress:
        if self.pieces:
            return PieceByPiece(self._shards, self._needs, self.pieces, self._piece_of)
        return ShardByShard(self._shards, self._needs, together=self._together)


@dataclass(slots=True)
class OpenStep:
    """The progress of one step."""

    tasks: dict[str, TaskProgress]
    left: int
    """Tasks that are not done."""
    ending: int = 0
    """Runs among these that need no further command: updates whose last piece is running."""
    round: int = 0
    """Dynamic-sampling round."""


class TaskState:
    """One task in all open steps."""

    def __init__(
        self, task: PlannedTask, executor: Executor, place: int, order: ShardOrder, open_steps: Mapping[int, OpenStep]
    ) -> None:
        """`place`: index of the task in a step."""
        self.task, self.executor, self.place, self.order = task, executor, place, order
        self.is_source = not task.inputs
        self.in_order = self.is_source or task.replays or task.in_order
        """Whether it runs in the order of steps, even if other tasks are further ahead."""
        self.readers: list[TaskState] = []
        """Tasks that wait until this one is done."""
        self.queued_readers: list[TaskState] = []
        """Tasks that may be queued behind this one."""
        self.needs: list[TaskState] = []
        """Tasks that it waits for."""
        self.needs_sources_only = False
        """Whether the task waits for sources alone."""
        self.ends: list[TaskState] = [self] if self.in_order and not task.in_rounds else []
        """Ordered tasks whose step ends when this task is done."""
        self._open = open_steps
        self._undone: deque[int] = deque()
        self._ready: list[int] = []
        """Heap of steps, some of which may no longer be ready."""
        self._in_heap: set[int] = set()

    def enter(self, step: int) -> None:
        """A step with the task opens. Steps open in order."""
        if self.in_order:
            self._undone.append(step)

    def leave(self, step: int) -> None:
        """The task is done in `step`: ordered tasks that wait for it continue with the next step."""
        for state in self.ends:
            first = state._undone.popleft()
            assert first == step, f"{state.task.name} of {step} is done before the one of {first}"

    @property
    def oldest_undone(self) -> int:
        """The oldest step in which this task, which runs in order, is not done."""
        return self._undone[0]

    def ends_training(self, run: Run) -> bool:
        """Whether `run` is the last piece of an update."""
        return self.task.trains and run.shards == self.order.last_piece

    def round_in(self, step: int) -> int:
        """The round of the task in `step`; 0 if it does not run in rounds."""
        return self._open[step].round if self.task.in_rounds else 0

    def mark_ready(self, step: int) -> None:
        if step not in self._in_heap:
            self._in_heap.add(step)
            heappush(self._ready, step)

    def is_marked(self, step: int) -> bool:
        return step in self._in_heap

    def progress(self, step: int) -> TaskProgress:
        """The task's progress in `step`, which is open and has the task."""
        return self._open[step].tasks[self.task.name]

    def has_left(self, step: int) -> bool:
        """Whether `step`, which is open, has the task and it is not done."""
        progress = self._open[step].tasks.get(self.task.name)
        return progress is not None and progress.left > 0

    def oldest_ready(self) -> int | None:
        while self._ready:
            step = self._ready[0]
            if step in self._open and self._open[step].tasks[self.task.name].ready:
                return step
            self._in_heap.discard(heappop(self._ready))
        return None

    def oldest_soon(self) -> int | None:
        """The oldest step in which the task is ready, or will be once its prompts are read."""
        step = self.oldest_ready()
        if step is None and self.needs_sources_only:
            return next((step for step in self._open if self.has_left(step)), None)
        return step


def make_task_states(plan: Plan, open_steps: Mapping[int, OpenStep]) -> dict[str, TaskState]:
    """The state of each task by name, connected with the tasks that wait for it."""
    waits_for = {task.name: plan.waits_for(task) for task in plan.tasks}
    states = {
        task.name: TaskState(
            task,
            plan.executors[task.executor],
            place,
            ShardOrder(task, plan.shards, len(waits_for[task.name])),
            open_steps,
        )
        for place, task in enumerate(plan.tasks)
    }
    for name, state in states.items():
        state.needs = needs = [states[need] for need in waits_for[name]]
        for need in needs:
            queued = plan.outputs_are_predictable(need.task) and need.executor is state.executor
            (need.queued_readers if queued else need.readers).append(state)
        state.needs_sources_only = all(need.is_source for need in needs)
        if state.task.selects:
            # The filter alone determines when the next step may read its prompts, and the buffer add to its batch.
            state.ends += [other for other in states.values() if other.in_order and other.task.in_rounds]
    return states
