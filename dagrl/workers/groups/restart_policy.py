"""How often a run may help itself where it has lost workers, and in which words it says so."""

from __future__ import annotations

from dagrl.workers.errors import WorkerLostError


class Restarts:
    """Counts the restarts of one `dagrl run`: of single workers, and of all.

    They have one bound together: what dies again and again ends the run, whatever it is.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self.count = 0
        """How many there were."""
        self._refused: WorkerLostError | None = None
        self.has_run = False
        """Whether all workers have been there once. What does not even start will not do so on a second try."""

    def once_more(self, failure: WorkerLostError, what: str) -> str:
        """Take one for `what`; what to tell the user. Raises `failure` where there are none left."""
        if not self.has_run or self.count == self._most:
            # Whoever asks for a worker is refused first, and for all of the run then.
            if self.count and failure is not self._refused:
                failure.hint = (
                    f"this was after {self.count} restart{'s' * (self.count > 1)}, as many as run.max_restarts allows"
                    + (f"; {failure.hint}" if failure.hint else "")
                )
            self._refused = failure
            raise failure
        self.count += 1
        who = failure.worker or "a worker"
        # Who only misses somebody is well itself.
        state = "cannot go on" if failure.worker and not failure.lost else "is lost"
        return f"{who} {state}: {failure.cause}; {what} (restart {self.count} of {self._most})"
