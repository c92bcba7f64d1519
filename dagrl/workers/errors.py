"""Failures of a run: exceptions that name the node, the worker and the cause."""

from __future__ import annotations

from typing import Self

from dagrl.config.errors import in_one_line
from dagrl.redact import hide_secrets
from dagrl.scheduler.plan import WorkerId


class RunError(Exception):
    """A run cannot continue. `node` and `worker` are empty if the failure belongs to none."""

    def __init__(self, cause: str, *, node: str = "", worker: str = "", hint: str = "", details: str = "") -> None:
        super().__init__(cause)
        self.cause, self.node, self.worker, self.hint = cause, node, worker, hint
        self.details = details
        """Text for the log file, such as a traceback."""
        self.memory = ""
        """Memory of each engine on shared devices."""
        self.log = ""
        """The log file with the details."""

    @classmethod
    def of(cls, sentence: str) -> Self:
        """The error of a sentence with a hint after a semicolon."""
        cause, _, hint = sentence.partition("; ")
        return cls(cause, hint=hint)

    def lines(self) -> list[str]:
        rows = (
            ("node", self.node),
            ("worker", self.worker),
            ("cause", self.cause),
            ("memory", self.memory),
            ("hint", self.hint),
            ("details", self.log),
        )
        return [f"  {name:<7} {hide_secrets(text)}" for name, text in rows if text]


class RefusedFolderError(RunError):
    """The run may not use the run folder. Raised before anything starts."""

    def __str__(self) -> str:
        return in_one_line(f"{self.cause}; {self.hint}")


class WorkerLostError(RunError):
    """Workers are lost. The run may restart them and continue."""

    def __init__(
        self, cause: str, *, lost: tuple[WorkerId, ...] = (), alive: tuple[WorkerId, ...] = (), **about: str
    ) -> None:
        """`lost`: the lost workers; empty if unknown. `alive`: those that have lost only their engine, and can build it
        again. `about`: as for `RunError`.
        """
        super().__init__(cause, **about)
        self.lost, self.alive = lost, alive

    @property
    def dead(self) -> set[WorkerId]:
        """The lost workers whose process has ended, or has to."""
        return {worker for worker in self.lost if worker not in self.alive}


class WorkerDiedError(WorkerLostError):
    """A worker's process has ended."""


class WorkerHungError(WorkerLostError):
    """A worker does not answer."""


class RayLostError(WorkerLostError):
    """A process of Ray itself has ended. No worker can be reached or restarted without a new Ray."""


class InterruptedRunError(Exception):
    """The user has stopped the run at once."""
