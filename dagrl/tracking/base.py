"""What the runtime asks of a tracker, and how the files of an earlier, longer life of a run are cut back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a rollout is."""

    name: str
    """The node; ``val/`` before it in validation."""
    step: int
    done: int
    """Prompts all of whose responses are there."""
    total: int
    tokens: int
    """Tokens sampled so far."""
    seconds: float
    """Time since it began."""


class Tracker(Protocol):
    """A place that metrics go to. `start`, then `log` once a step, then `close`."""

    def start(self, run_dir: Path, config: Mapping[str, Any], resumed_step: int | None) -> None:
        """Open what lies under `run_dir`; what was logged after `resumed_step` is to be forgotten, None: everything.

        `config` is the resolved pipeline, as plain YAML values.
        """
        ...

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record a step's metrics; when it returns, they survive the process."""
        ...

    def close(self, ok: bool) -> None:
        """Finish; `ok` False: the run failed. Closing twice, or what never started, is harmless."""
        ...


@dataclass(frozen=True, slots=True)
class SampleTable:
    """Some samples of a validation."""

    columns: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]
    """Texts and numbers, in the order of `columns`."""


@runtime_checkable
class SampleTracker(Tracker, Protocol):
    """A tracker that shows samples, too."""

    def samples(self, step: int, table: SampleTable) -> None:
        """Show samples of the validation after `step`, whose metrics have been logged."""
        ...


def is_kept(step: int, resumed_step: int | None) -> bool:
    """Whether what was recorded at `step` is part of the run that goes on after `resumed_step`."""
    return resumed_step is not None and step <= resumed_step


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Within the context an OSError becomes one that says in a sentence which file could not be written."""
    try:
        yield
    except OSError as error:
        raise OSError(f"cannot write {path}: {error.strerror or error}") from error


def replace_text(path: Path, text: str) -> None:
    """Put `text` in place of the file's contents at once: a kill leaves the old or the new."""
    aside = path.with_name(path.name + ".new")
    try:
        aside.write_text(text, encoding="utf-8")
        aside.replace(path)
    except OSError:
        with suppress(OSError):
            aside.unlink()
        raise
