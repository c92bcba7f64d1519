"""The outcome of a run."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """The end of a successful run."""

    step: int
    """Newest finished step."""
    stopped: bool
    """Whether the user stopped it before its last step."""
    out_of_time: bool = False
    """Whether ``run.stop_after`` stopped it."""
    alarm: str = ""
    """The alarm of ``run.stop_when`` that ended it, with its step."""
    before: bool = False
    """Whether the run had finished before."""
    changed: str = ""
    """Differences from the pipeline of the finished run."""
    seconds: float | None = None
    """Duration since the start of this call."""
    only_validated: bool = False
    """Whether the run validated step `step` without training."""
    policies: tuple[str, ...] = ()
    """Trained engines whose weights can be exported."""
