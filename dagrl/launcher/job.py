"""What the machines of a job are to do together, as one of them knows it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dagrl.config.schema import Pipeline
from dagrl.launcher.node_rank import Place
from dagrl.scheduler.machines import Machine


@dataclass(frozen=True, slots=True)
class Job:
    """A job, seen from one machine."""

    place: Place
    machine: Machine
    """This one, and what groups may have of it."""
    pipeline: Pipeline
    arguments: list[str]
    """Of `dagrl run`."""
    logs: Path
    """Where what workers have printed is kept."""
    variables: dict[str, str]
    """The environment that the command was called in."""
    note: Callable[[str], None]
    """Says something to the user."""
