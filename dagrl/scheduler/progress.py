"""The progress of a task in one step: which shards have their inputs, which were started, which are done.

The cost of each update depends on its shards, not on how many others there are.
"""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heappop, heappush

from dagrl.config.schema import Scope
from dagrl.scheduler.plan import PlannedTask


class _Progress:
    """One task in one step."""

    __slots__ = ("_done", "left")

    def __init__(self, shards: int) -> None:
        self.left = shards
        """Shards that are not done."""
        self._done = bytearray(shards)

    def finish(self, shards: Iterable[int]) -> list[int]:
        """Mark `shards` as done; returns those that were not before."""
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
        """Heap of the ready shards that were not started."""

    @property
    def ready(self) -> bool:
        """Whether shards with all inputs wait to be started."""
        return bool(self._waiting)

    @property
    def next(self) -> tuple[int, ...]:
        return tuple(sorted(self._waiting)) if self._together else (self._waiting[0],)

    @property
    def takes_rest(self) -> bool:
        """Whether no shard is left after `next`, or none that could run together with them."""
        return (len(self._waiting) if self._together else 1) == self._to_start

    def start(self) -> None:
        self._to_start -= len(self._waiting) if self._together else 1
        if self._together:
            self._waiting.clear()
        else:
            heappop(self._waiting)

    def supply(self, shards: Iterable[int]) -> None:
        """One of the tasks that this one needs has finished `shards`."""
        lacking = self._lacking
        for shard in shards:
            lacking[shard] -= 1
            if not lacking[shard]:
                heappush(self._waiting, shard)

    def give_back(self, shards: Iterable[int]) -> None:
        """A run of `shards` has failed: those that are not done must be started again."""
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
        """Whether the next piece has all inputs and the one before has ended."""
        return not self._running and self._piece < len(self._pieces) and not self._lacking[self._piece]

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
        """One of the tasks that this one needs has finished `shards`."""
        for shard in shards:
            self._lacking[self._piece_of[shard]] -= 1

    def give_back(self, shards: Iterable[int]) -> None:
        self._running = False

    def finish(self, shards: Iterable[int]) -> list[int]:
        """Mark `shards` as done; returns those that were not before."""
        new = super().finish(shards)
        self._left_of_piece -= len(new)
        if new and not self._left_of_piece:
            self._running = False
            self._piece += 1
            self._left_of_piece = len(self._pieces[self._piece]) if self._piece < len(self._pieces) else 0
        return new


TaskProgress = ShardByShard | PieceByPiece


class ShardOrder:
    """In which order one task processes the shards of a step."""

    def __init__(self, task: PlannedTask, shards: int, needs: int) -> None:
        """`needs`: how many tasks it waits for."""
        self._shards, self._needs = shards, needs
        # An engine runs one task at a time, and each run has a cost: a call to every rank, swapping weights.
        # CPU workers process shards in parallel.
        self._together = task.engine is not None
        self._pieces = task.pieces
        if not task.pieces and (task.streams or task.trains or task.scope is Scope.BATCH):
            self._pieces = (tuple(range(shards)),)
        places = {shard: place for place, piece in enumerate(self._pieces) for shard in piece}
        in_pieces = len(places) == shards == sum(len(piece) for piece in self._pieces) and all(self._pieces)
        assert not self._pieces or in_pieces, f"the pieces of {task.name} are not each shard once"
        self._piece_of = [places[shard] for shard in range(shards)] if places else []

    @property
    def last_piece(self) -> tuple[int, ...]:
        """The last piece, if the task runs in pieces."""
        return self._pieces[-1]

    def begin(self) -> TaskProgress:
        if self._pieces:
            return PieceByPiece(self._shards, self._needs, self._pieces, self._piece_of)
        return ShardByShard(self._shards, self._needs, together=self._together)
