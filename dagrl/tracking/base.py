"""The tracker protocol, and helpers to write files and to truncate files of a resumed run."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of a rollout."""

    name: str
    """The node; with the prefix ``val/`` in validation."""
    step: int
    done: int
    """Prompts with all responses finished."""
    total: int
    tokens: int
    """Tokens sampled so far."""
    seconds: float
    """Time since the rollout began."""


class Tracker(Protocol):
    """A destination of metrics. Call `start`, then `log` once per step, then `close`."""

    def start(self, run_dir: Path, config: Mapping[str, object], resumed_step: int | None) -> None:
        """Open files under `run_dir`; drop all steps after `resumed_step`, None: all steps.

        `config` is the resolved pipeline as plain YAML values.
        """

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record a step's metrics durably."""

    def close(self, ok: bool) -> None:
        """Finish; `ok` is False if the run failed. May be called twice, or without `start`."""


@dataclass(frozen=True, slots=True)
class SampleTable:
    """Samples of a validation as a table."""

    columns: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]
    """Texts and numbers in the order of `columns`."""


@runtime_checkable
class SampleTracker(Tracker, Protocol):
    """A tracker that also shows samples."""

    def samples(self, step: int, table: SampleTable) -> None:
        """Show samples of the validation after `step`; its metrics have been logged."""


def is_kept(step: int, resumed_step: int | None) -> bool:
    """Whether an entry of `step` belongs to a run resumed after `resumed_step`."""
    return resumed_step is not None and step <= resumed_step


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Context that turns an OSError into one that names the file."""
    try:
        yield
    except OSError as error:
        raise OSError(f"cannot write {path}: {error.strerror or error}") from error


def check_in_place(path: Path, descriptor: int) -> None:
    """Raise FileNotFoundError if an open file was removed or replaced, so that its contents are lost."""
    if not (path.exists() and os.path.samestat(path.stat(), os.fstat(descriptor))):
        raise FileNotFoundError(errno.ENOENT, "it was removed during the run")


def replace_text(path: Path, text: str, *, private: bool = False) -> None:
    """Replace the file's contents atomically; a `private` file is readable by its owner alone, from the beginning."""
    aside = path.with_name(path.name + ".new")
    try:
        if private:
            aside.unlink(missing_ok=True)
            aside.touch(mode=0o600)
        aside.write_text(text, encoding="utf-8")
        aside.replace(path)
    except OSError:
        with suppress(OSError):
            aside.unlink()
        raise
