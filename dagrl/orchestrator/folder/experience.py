"""The folder through which the parts of a pipeline exchange experience and weights.

    batches/EXPLORER-NUMBER.parquet   each explorer numbers its batches from 1
    explorers/EXPLORER.json           whether the explorer has ended
    trainer.json the run that trains on them, and whether it has ended
    weights/version_N/ENGINE          the policy after N steps, as a Hugging Face folder
    weights/version_N/used.json       the newest batch of each explorer that these weights were trained on

Everything is written aside and renamed, and no process waits for a lock, so that a shared file system suffices.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dagrl.tracking.base import replace_text

_BATCH = re.compile(r"(.+)-(\d+)\.parquet")
_VERSION = re.compile(r"version_(\d+)")
_USED = "used.json"
_KEPT_WEIGHTS = 3
"""Explorers may still read weights older than the newest."""

type Used = Mapping[str, int]
"""Explorer -> its newest batch that was used: all before it were used, too."""


@dataclass(frozen=True, slots=True)
class PublishedWeights:
    """The weights of a policy version."""

    folder: Path
    version: int
    used: Used
    written: str
    """Differs if a trainer has written the version again, after a resume."""


class ExperienceFolder:
    """One folder of experience."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._batches, self._weights = path / "batches", path / "weights"

    # -- batches

    def batch(self, explorer: str, number: int) -> Path:
        return self._batches / f"{explorer}-{number:06d}.parquet"

    def unpublished(self, explorer: str, number: int) -> Path:
        """The path of a batch until its step is saved."""
        batch = self.batch(explorer, number)
        return batch.with_name(f".{batch.name}.unpublished")

    def publish(self, explorer: str, number: int) -> None:
        """Let the trainer see a batch. Does nothing if it was published before."""
        batch, aside = self.batch(explorer, number), self.unpublished(explorer, number)
        if not batch.exists() and aside.exists():
            aside.rename(batch)
            _sync(self._batches)

    def batches(self) -> dict[str, dict[int, Path]]:
        """Explorer -> its batches by number."""
        batches: dict[str, dict[int, Path]] = {}
        for path in self._batches.glob("[!.]*.parquet"):
            if name := _BATCH.fullmatch(path.name):
                batches.setdefault(name[1], {})[int(name[2])] = path
        return batches

    # -- who writes, and who reads

    def note_explorer(self, explorer: str, run: Path, *, ended: bool) -> None:
        (self.path / "explorers").mkdir(parents=True, exist_ok=True)
        _note(self.path / "explorers" / f"{explorer}.json", run, ended=ended)

    def explorers(self) -> dict[str, tuple[str, bool]]:
        """Explorer -> its run folder, and whether it has ended."""
        return {file.stem: _noted(file) for file in sorted((self.path / "explorers").glob("*.json"))}

    def note_trainer(self, run: Path, *, ended: bool) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        _note(self.path / "trainer.json", run, ended=ended)

    def trainer(self) -> tuple[str, bool]:
        """The run folder of the trainer, empty without one, and whether it has ended."""
        return _noted(self.path / "trainer.json")

    # -- weights

    def unpublished_weights(self, version: int) -> Path:
        """The path of a version's weights until its step is committed."""
        return self._weights / f".version_{version}.partial"

    def publish_weights(self, version: int, used: Used) -> None:
        """Let explorers see the weights that were written, and remove old ones. Version 0 stays: explorers start there.

        Raises OSError.
        """
        aside = self.unpublished_weights(version)
        written = {"used": dict(used), "written": os.urandom(8).hex()}
        (aside / _USED).write_text(json.dumps(written))
        final = self._version(version)
        self._remove(final)
        aside.rename(final)
        _sync(self._weights)
        for old in sorted(self._versions())[:-_KEPT_WEIGHTS]:
            if old:
                self._remove(self._version(old))

    def remove_unpublished_weights(self) -> None:
        for left in self._weights.glob(".version_*"):
            shutil.rmtree(left, ignore_errors=True)

    def remove_weights_after(self, version: int) -> None:
        for later in self._versions():
            if later > version:
                self._remove(self._version(later))

    def weights(self, version: int | None = None) -> PublishedWeights | None:
        """The weights of a version, or the newest ones."""
        for number in sorted(self._versions(), reverse=True):
            folder = self._version(number)
            # A removal may come between the two.
            if version in (None, number) and (fields := _read(folder / _USED)):
                return PublishedWeights(folder, number, fields["used"], fields["written"])
        return None

    def _version(self, version: int) -> Path:
        return self._weights / f"version_{version}"

    def _versions(self) -> list[int]:
        names = (_VERSION.fullmatch(path.name) for path in self._weights.glob("version_*"))
        return [int(name[1]) for name in names if name]

    def _remove(self, folder: Path) -> None:
        """Rename it first, so that no explorer starts to read a partly removed folder."""
        if folder.exists():
            aside = folder.with_name(f".{folder.name}.old")
            shutil.rmtree(aside, ignore_errors=True)
            shutil.rmtree(folder.rename(aside), ignore_errors=True)


def _note(file: Path, run: Path, *, ended: bool) -> None:
    replace_text(file, json.dumps({"run": str(run.resolve()), "ended": ended}))


def _noted(file: Path) -> tuple[str, bool]:
    fields = _read(file)
    return str(fields.get("run", "")), bool(fields.get("ended"))


def _read(file: Path) -> dict[str, Any]:
    try:
        fields = json.loads(file.read_text())
    except (OSError, ValueError):
        return {}
    return fields if isinstance(fields, dict) else {}


def _sync(folder: Path) -> None:
    """Wait until the names in a folder are on the disk, if the file system supports it."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            os.fsync(opened)
    finally:
        os.close(opened)
