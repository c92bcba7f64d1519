"""Checkpoints of a run: written to a temporary folder, renamed into place, found, and removed when they are old.

``checkpoints/step_N/`` holds a folder for each trained engine, ``order.json`` with the order of prompts, and
``state.json``, which is written last and has the checksums of all files: a checkpoint without it, or with a changed
file, is torn and never loaded. With ``run.keep_best``, ``checkpoints/best`` names the best one, which follows from the
states alone.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import zlib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from dagrl.config.schema import KeepBestSpec, RunSpec
from dagrl.tracking.base import replace_text
from dagrl.version import __version__

_STATE = "state.json"
_ORDER = "order.json"
_BEST = "best"
_FORMAT = 1
_SEAL = "seal"
"""Checksum of the other fields in ``state.json``."""
_READ_WHOLE = 2**20
"""Files up to this size are read completely."""
_SAMPLES, _SAMPLE_BYTES = 256, 4096
"""Pieces of larger files that are read, evenly spread, both ends included: a second for a terabyte. Parts that a power
cut or an incomplete copy omits are longer than the gaps."""

Table = Mapping[str, tuple[int, int]]
"""Relative path -> size in bytes and checksum."""


class TornCheckpointError(ValueError):
    """A checkpoint is incomplete or damaged."""

    def __init__(self, folder: Path, fault: str) -> None:
        super().__init__(f"the checkpoint {folder} is torn: {fault}")


@dataclass(frozen=True, slots=True)
class Score:
    """The score of a checkpoint."""

    metric: str
    value: float


@dataclass(frozen=True, slots=True)
class RunState:
    """The state of a run except that of its engines."""

    step: int
    """Newest finished step."""
    model: str
    order: Mapping[str, Any] = field(default_factory=dict)
    """The state of the `PromptOrder`. Empty at the start, and in checkpoints of versions before it."""
    carried: tuple[int, ...] = ()
    """Ids of unfinished prompts, which come first in the next step."""
    score: Score | None = None
    """None if it was not measured."""
    kl_weights: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """Node with an adaptive KL weight -> weights of the next steps."""
    carried_tokens: tuple[tuple[int, ...], ...] = ()
    """Tokens of each sample of the `carried` prompts, which a resumed run samples again; -1 if not started."""
    experience: Mapping[str, int] = field(default_factory=dict)
    """Only of a trainer with explorers: explorer -> its newest batch that was used."""
    baselines: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Node with baselines of roles -> role -> its baseline."""

    def finishes(self, run: RunSpec, rows: int) -> bool:
        """Whether the run is finished. `rows`: prompts of the training file."""
        end = run.end_position(rows)
        return self.step >= run.steps or (end is not None and self.order.get("passed", 0) >= end)


@dataclass(frozen=True, slots=True)
class FoundCheckpoint:
    """The checkpoint from which a run can resume."""

    folder: Path | None
    """The newest complete checkpoint."""
    state: RunState | None
    torn: Mapping[Path, str]
    """Newer torn checkpoints -> their faults."""


class Checkpoints:
    """The checkpoints of one run folder."""

    def __init__(self, run_dir: Path, keep: int | Literal["all"], keep_best: KeepBestSpec | None = None) -> None:
        """The newest `keep` checkpoints are kept, and the best one."""
        self._folder = run_dir / "checkpoints"
        self._keep, self._keep_best = keep, keep_best

    def begin(self, step: int) -> Path:
        aside = self._folder / f".step_{step}.partial"
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        return aside

    def finish(self, aside: Path, state: RunState) -> Path:
        """Make a temporary folder the newest checkpoint, with one rename, and remove old ones. Raises OSError."""
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
        for _, old in self._finished()[: -self._keep] if self._keep != "all" else ():
            if old != best:
                _remove(old)
        return final

    def _put_into_place(self, aside: Path, state: RunState) -> Path:
        with (aside / _ORDER).open("w") as file:
            json.dump(state.order, file)
            file.flush()
            os.fsync(file.fileno())
        own = {name: value for name, value in asdict(replace(state, order={})).items() if name != "order"}
        fields = {"format": _FORMAT, "dagrl": __version__, **own, "files": fingerprints(aside)}
        with (aside / _STATE).open("w") as file:
            file.write(json.dumps(fields | {_SEAL: _seal(fields)}, indent=1))
            file.flush()
            os.fsync(file.fileno())
        final = self.of_step(state.step)
        # A checkpoint of this step from before a resume stays until the new one is in place.
        former = final.with_name(f".{final.name}.partial-former")
        if final.exists():
            final.rename(former)
        aside.rename(final)
        shutil.rmtree(former, ignore_errors=True)
        return final

    def remove_torn(self) -> None:
        for aside in self._folder.glob(".step_*.partial*"):
            if aside.is_dir():
                shutil.rmtree(aside, ignore_errors=True)
            else:
                aside.unlink(missing_ok=True)

    def steps(self) -> list[int]:
        return [step for step, _ in self._finished()]

    def of_step(self, step: int) -> Path:
        return self._folder / f"step_{step}"

    def best(self) -> Path | None:
        """The first checkpoint with the best score. None if no checkpoint has one, or the best one is not kept."""
        best = self._keep_best
        if best is None:
            return None
        scores = {}
        for _, folder in self._finished():
            with suppress(TornCheckpointError):
                score = _score_of(_fields(folder))
                if score is not None and score.metric == best.metric:
                    scores[folder] = score.value
        return (max if best.mode == "max" else min)(scores, key=scores.__getitem__, default=None)

    def find(self) -> FoundCheckpoint:
        """The newest checkpoint that is not torn. Raises ValueError for an unknown format."""
        torn: dict[Path, str] = {}
        for _, folder in reversed(numbered_steps(self._folder)):
            try:
                return FoundCheckpoint(folder, self.read(folder), torn)
            except TornCheckpointError as error:
                torn[folder] = str(error)
        return FoundCheckpoint(None, None, torn)

    def set_aside(self, torn: Path) -> Path:
        """Rename a torn checkpoint, so that it no longer counts; returns the new path."""
        place = torn.with_name(f"{torn.name}.torn")
        shutil.rmtree(place, ignore_errors=True)
        return torn.rename(place)

    def read(self, folder: Path) -> RunState:
        """The state in a checkpoint. Raises TornCheckpointError, or ValueError for an unknown format."""
        fields = _fields(folder)
        if fields.get("format") != _FORMAT:
            raise ValueError(
                f"{folder} was written by dagrl {fields.get('dagrl')} in format {fields.get('format')}, "
                f"this one reads format {_FORMAT}"
            )
        # Checkpoints of earlier versions have no checksums.
        if fault := damage(folder, fields.get("files", {})):
            raise TornCheckpointError(folder, fault)
        try:
            former = {"position": fields["position"], "passed": fields["position"]} if "position" in fields else None
            order = former or json.loads((folder / _ORDER).read_text())
            return RunState(
                fields["step"],
                fields["model"],
                order,
                tuple(fields.get("carried", ())),
                _score_of(fields),
                {name: tuple(weights) for name, weights in fields.get("kl_weights", {}).items()},
                tuple(tuple(tokens) for tokens in fields.get("carried_tokens", ())),
                fields.get("experience", {}),
                fields.get("baselines", {}),
            )
        except KeyError as missing:
            raise TornCheckpointError(folder, f"{_STATE} lacks {missing}") from missing
        except (OSError, ValueError) as error:
            raise TornCheckpointError(folder, f"{_ORDER} cannot be read") from error

    def _finished(self) -> list[tuple[int, Path]]:
        """Finished checkpoints with their steps, oldest first."""
        return [(step, folder) for step, folder in numbered_steps(self._folder) if (folder / _STATE).is_file()]


def numbered_steps(folder: Path) -> list[tuple[int, Path]]:
    """The folders ``step_N`` in a folder, with their steps, oldest first."""
    numbers = ((re.fullmatch(r"step_(\d+)", path.name), path) for path in folder.glob("step_*"))
    return sorted((int(number[1]), path) for number, path in numbers if number)


def _remove(old: Path) -> None:
    """Rename it first, so that a partly removed folder is not mistaken for a checkpoint.

    On a shared file system a file that another process reads may keep the folder.
    """
    aside = old.with_name(f".{old.name}.partial-old")
    shutil.rmtree(aside, ignore_errors=True)
    shutil.rmtree(old.rename(aside), ignore_errors=True)


def _score_of(fields: Mapping[str, Any]) -> Score | None:
    score = fields.get("score")
    return Score(score["metric"], score["value"]) if score else None


def _fields(folder: Path) -> dict[str, Any]:
    """The fields of ``state.json``. Raises TornCheckpointError if it is damaged."""
    state = folder / _STATE
    try:
        # Reading a pipe would block.
        fields = json.loads(state.read_text() if state.is_file() else "")
    except (OSError, ValueError) as error:
        raise TornCheckpointError(folder, f"{_STATE} cannot be read") from error
    if isinstance(fields, dict) and "format" in fields:
        seal = fields.pop(_SEAL, None)
        # Checkpoints of earlier versions have neither.
        if seal == (_seal(fields) if seal is not None or "files" in fields else None):
            return fields
    raise TornCheckpointError(folder, f"{_STATE} holds something else than was written")


def _seal(fields: Mapping[str, object]) -> int:
    return zlib.crc32(json.dumps(fields, sort_keys=True).encode())


def fingerprints(folder: Path) -> Table:
    """The files in `folder`, without ``state.json``."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path != folder / _STATE)
    return {str(path.relative_to(folder)): (path.stat().st_size, _checksum(path)) for path in files}


def damage(folder: Path, table: Table) -> str | None:
    """The fault of the first changed file of `folder`. None if all files are unchanged."""
    for name, (size, checksum) in table.items():
        path = folder / name
        try:
            there = path.stat().st_size
            if there != size:
                return f"{name} has {there} bytes instead of {size}"
            if _checksum(path) != checksum:
                return f"{name} holds something else than was written"
        except FileNotFoundError:
            return f"{name} is missing"
        except OSError as error:
            return f"{name} cannot be read ({error.strerror})"
    return None


def _checksum(path: Path) -> int:
    checksum = 0
    with path.open("rb") as file:
        for piece in _pieces(path.stat().st_size):
            file.seek(piece.start)
            checksum = zlib.crc32(file.read(len(piece)), checksum)
    return checksum


def _pieces(size: int) -> Iterator[range]:
    if size <= _READ_WHOLE:
        yield range(size)
        return
    last = size - _SAMPLE_BYTES
    for sample in range(_SAMPLES):
        start = last * sample // (_SAMPLES - 1)
        yield range(start, start + _SAMPLE_BYTES)
