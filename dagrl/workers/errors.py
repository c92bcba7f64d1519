"""How a run fails: one exception that says where, who and why."""

from __future__ import annotations

from dagrl.config.errors import in_one_line


class RunError(Exception):
    """A run that cannot go on. `node` and `worker` are empty where the failure is not theirs."""

    def __init__(self, cause: str, *, node: str = "", worker: str = "", hint: str = "", details: str = "") -> None:
        super().__init__(cause)
        self.cause = cause
        self.node = node
        self.worker = worker
        self.hint = hint
        self.details = details
        """What goes to the log and not to the terminal: a traceback, for instance."""
        self.memory = ""
        """Who held devices that several engines share."""
        self.log = ""
        """The file that holds them."""

    def lines(self) -> list[str]:
        """The failure as lines for a terminal."""
        rows = (
            ("node", self.node),
            ("worker", self.worker),
            ("cause", self.cause),
            ("memory", self.memory),
            ("hint", self.hint),
            ("details", self.log),
        )
        return [f"  {name:<7} {text}" for name, text in rows if text]


class RefusedFolderError(RunError):
    """A run folder that the run may not use, found before anything starts."""

    def __str__(self) -> str:
        return in_one_line(f"{self.cause}; {self.hint}")


class WorkerLostError(RunError):
    """Workers that are of no use any more. The run is not to blame: it may go on from what there is without them."""

    lost: tuple[str, ...] = ()
    """Their names, as ``executor/rank``; none where it is not known who they are."""


class WorkerDiedError(WorkerLostError):
    """A worker's process is gone."""


class WorkerHungError(WorkerLostError):
    """A worker says nothing any more."""


class InterruptedRunError(Exception):
    """The user wanted the run to end at once."""
