"""Checkpoints of a whole run: written aside, renamed into place, found again, and thinned out.

``checkpoints/step_N/`` holds a folder for each trained engine and ``state.json``, which is written last and says what
all files look like: a folder without it, or with a file that has changed since, is torn and never gone on from. Where
the best one is kept, ``checkpoints/best`` says which that is; which one is best follows from the states alone.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dagrl import __version__
from dagrl.config.schema import KeepBestSpec
from dagrl.orchestrator.folder.fingerprints import checksum_of, damage, fingerprints
from dagrl.tracking.base import replace_text

_STATE = "state.json"
_BEST = "best"
_FORMAT = 1
_SEAL = "seal"
"""Checksum of all else in ``state.json``."""


class TornCheckpointError(ValueError):
    """A checkpoint that is not what was written."""


@dataclass(frozen=True, slots=True)
class Score:
    """How good a checkpoint is."""

    metric: str
    value: float


@dataclass(frozen=True, slots=True)
class RunState:
    """What a run knows besides the engines' weights."""

    step: int
    """Newest finished step."""
    position: int
    """Prompts of the data set used so far, over all epochs."""
    model: str
    """What the weights belong to."""
    carried: tuple[int, ...] = ()
    """Places in the data set of prompts before `position` that were begun and have to come again."""
    score: Score | None = None
    """How good it is; None where that was not measured."""
    kl_weights: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """Of nodes that steer the weight of a divergence: those of the next steps."""


@dataclass(frozen=True, slots=True)
class Found:
    """Where a run can go on."""

    folder: Path | None
    """The newest checkpoint that is whole."""
    state: RunState | None
    """What it holds."""
    torn: Mapping[Path, str]
    """Newer ones that are not whole: what is wrong with each, as a sentence."""


class Checkpoints:
    """The checkpoints of one run folder."""

    def __init__(self, run_dir: Path, keep: int, keep_best: KeepBestSpec | None = None) -> None:
        """The newest `keep` stay, and the best."""
        self._folder = run_dir / "checkpoints"
        self._keep, self._keep_best = keep, keep_best

    def begin(self, step: int) -> Path:
        """An empty folder to write step `step` into; what a torn save has left there is removed."""
        aside = self._folder / f".step_{step}.partial"
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        return aside

    def finish(self, aside: Path, state: RunState) -> Path:
        """Make what was written the newest checkpoint, in one rename, and remove those that need not stay.

        OSError, with a sentence, where it cannot be written; those that were there stay.
        """
        try:
            final = self._put_into_place(aside, state)
        except OSError as error:
            raise OSError(
                f"cannot write the checkpoint to {aside}: {error.strerror}; make room, or lower run.keep"
            ) from error
        best = self.best()
        if best is not None:
            replace_text(self._folder / _BEST, best.name + "\n")
        else:
            (self._folder / _BEST).unlink(missing_ok=True)
        for _, old in self._finished()[: -self._keep]:
            if old != best:
                _remove(old)
        return final

    def _put_into_place(self, aside: Path, state: RunState) -> Path:
        fields = {"format": _FORMAT, "dagrl": __version__, **asdict(state), "files": fingerprints(aside, [_STATE])}
        with (aside / _STATE).open("w") as file:
            file.write(json.dumps(fields | {_SEAL: _seal(fields)}, indent=1))
            file.flush()
            os.fsync(file.fileno())
        final = self.of_step(state.step)
        # Where the step was saved before, and did not count: in its way, but not to be missed in any case.
        former = final.with_name(f".{final.name}.partial-former")
        if final.exists():
            final.rename(former)
        aside.rename(final)
        shutil.rmtree(former, ignore_errors=True)
        return final

    def remove_torn(self) -> None:
        """Free the space that saves which were cut off still take."""
        for aside in self._folder.glob(".step_*.partial*"):
            if aside.is_dir():
                shutil.rmtree(aside, ignore_errors=True)
            else:
                aside.unlink(missing_ok=True)

    def steps(self) -> list[int]:
        """Steps of which there is a finished checkpoint, in order."""
        return [step for step, _ in self._finished()]

    def of_step(self, step: int) -> Path:
        """Where the checkpoint of a step is."""
        return self._folder / f"step_{step}"

    def best(self) -> Path | None:
        """The checkpoint with the best score, of several the first; None where none has one, or none is to be kept."""
        best = self._keep_best
        if best is None:
            return None
        scores = {
            folder: score.value
            for _, folder in self._finished()
            if (score := _score_in(folder)) is not None and score.metric == best.metric
        }
        return (max if best.mode == "max" else min)(scores, key=scores.__getitem__, default=None)

    def find(self) -> Found:
        """The newest checkpoint to go on from. ValueError as `read` has it, but for those that are torn."""
        torn: dict[Path, str] = {}
        for _, folder in reversed(self._numbered()):
            try:
                return Found(folder, self.read(folder), torn)
            except TornCheckpointError as error:
                torn[folder] = str(error)
        return Found(None, None, torn)

    def set_aside(self, torn: Path) -> Path:
        """Put a torn checkpoint where it is not counted any more; returns where that is."""
        place = torn.with_name(f"{torn.name}.torn")
        shutil.rmtree(place, ignore_errors=True)
        return torn.rename(place)

    def read(self, folder: Path) -> RunState:
        """The state in a checkpoint.

        TornCheckpointError where a file of it is not as it was written; ValueError where another version of dagrl wrote
        it in another form.
        """
        fields = _fields(folder)
        if fields.get("format") != _FORMAT:
            raise ValueError(
                f"{folder} was written by dagrl {fields.get('dagrl')} in format {fields.get('format')}, "
                f"this one reads format {_FORMAT}"
            )
        # Those of earlier versions say nothing about their files.
        if found := damage(folder, fields.get("files", {})):
            raise TornCheckpointError(f"the checkpoint {folder} is torn: {found}")
        try:
            return RunState(
                fields["step"],
                fields["position"],
                fields["model"],
                tuple(fields.get("carried", ())),
                _score_of(fields),
                {name: tuple(weights) for name, weights in fields.get("kl_weights", {}).items()},
            )
        except KeyError as missing:
            raise TornCheckpointError(f"the checkpoint {folder} is torn: {_STATE} lacks {missing}") from missing

    def _finished(self) -> list[tuple[int, Path]]:
        """Finished checkpoints with their steps, oldest first."""
        return [(step, folder) for step, folder in self._numbered() if (folder / _STATE).is_file()]

    def _numbered(self) -> list[tuple[int, Path]]:
        """Folders with a checkpoint's name and their steps, oldest first."""
        numbers = ((re.fullmatch(r"step_(\d+)", folder.name), folder) for folder in self._folder.glob("step_*"))
        return sorted((int(number[1]), folder) for number, folder in numbers if number)


def _remove(old: Path) -> None:
    """Out of sight first, so that none that is half removed is taken for one, and then as far as others allow it.

    A file that somebody reads, an export for instance, may keep its folder on a shared file system.
    """
    aside = old.with_name(f".{old.name}.partial-old")
    shutil.rmtree(aside, ignore_errors=True)
    shutil.rmtree(old.rename(aside), ignore_errors=True)


def _score_in(folder: Path) -> Score | None:
    """The score in a checkpoint; None in a torn one."""
    try:
        return _score_of(_fields(folder))
    except TornCheckpointError:
        return None


def _score_of(fields: Mapping[str, Any]) -> Score | None:
    score = fields.get("score")
    return Score(score["metric"], score["value"]) if score else None


def _fields(folder: Path) -> dict[str, Any]:
    """What ``state.json`` says, if it is what was written."""
    state = folder / _STATE
    try:
        fields = json.loads(state.read_text()) if state.is_file() else _unreadable(state)
    except (OSError, ValueError) as error:
        raise TornCheckpointError(f"the checkpoint {folder} is torn: {_STATE} cannot be read") from error
    if isinstance(fields, dict) and "format" in fields:
        seal = fields.pop(_SEAL, None)
        # Those of earlier versions have neither.
        if seal == (_seal(fields) if seal is not None or "files" in fields else None):
            return fields
    raise TornCheckpointError(f"the checkpoint {folder} is torn: {_STATE} holds something else than was written")


def _unreadable(state: Path) -> Any:
    """OSError for what is not a file: to read a pipe would wait for its writer."""
    raise OSError(f"{state} is not a file")


def _seal(fields: Mapping[str, Any]) -> int:
    return checksum_of(json.dumps(fields, sort_keys=True).encode())
