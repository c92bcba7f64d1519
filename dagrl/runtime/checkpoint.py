"""Checkpoints of a whole run: written aside, renamed into place, found again, and thinned out.

``checkpoints/step_N/`` holds a folder for each trained engine and ``state.json``, which is written last: a folder
without it is torn and never picked.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

from dagrl import __version__

_STATE = "state.json"
_FORMAT = 1


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


class Checkpoints:
    """The checkpoints of one run folder."""

    def __init__(self, run_dir: Path, keep: int) -> None:
        self._folder = run_dir / "checkpoints"
        self._keep = keep

    def begin(self, step: int) -> Path:
        """An empty folder to write step `step` into; what a torn save has left there is removed."""
        aside = self._folder / f".step_{step}.partial"
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        return aside

    def finish(self, aside: Path, state: RunState) -> Path:
        """Make what was written the newest checkpoint, in one rename, and remove the oldest beyond `keep`."""
        text = json.dumps({"format": _FORMAT, "dagrl": __version__, **asdict(state)}, indent=1)
        with (aside / _STATE).open("w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        final = self.of_step(state.step)
        shutil.rmtree(final, ignore_errors=True)
        aside.rename(final)
        for old in self._whole()[: -self._keep]:
            shutil.rmtree(old)
        return final

    def remove_torn(self) -> None:
        """Free the space that saves which were cut off still take."""
        for aside in self._folder.glob(".step_*.partial"):
            shutil.rmtree(aside, ignore_errors=True)

    def steps(self) -> list[int]:
        """Steps of which there is a whole checkpoint, in order."""
        return [step for step, _ in self._numbered()]

    def of_step(self, step: int) -> Path:
        """Where the checkpoint of a step is."""
        return self._folder / f"step_{step}"

    def newest(self) -> Path | None:
        """The newest whole checkpoint, or None."""
        whole = self._whole()
        return whole[-1] if whole else None

    def read(self, folder: Path) -> RunState:
        """The state in a checkpoint. ValueError where another version of dagrl wrote it in another form."""
        fields = json.loads((folder / _STATE).read_text())
        if fields.get("format") != _FORMAT:
            raise ValueError(
                f"{folder} was written by dagrl {fields.get('dagrl')} in format {fields.get('format')}, "
                f"this one reads format {_FORMAT}"
            )
        return RunState(fields["step"], fields["position"], fields["model"], tuple(fields.get("carried", ())))

    def _whole(self) -> list[Path]:
        """Whole checkpoints, oldest first."""
        return [folder for _, folder in self._numbered()]

    def _numbered(self) -> list[tuple[int, Path]]:
        found = []
        for folder in self._folder.glob("step_*"):
            number = re.fullmatch(r"step_(\d+)", folder.name)
            if number and (folder / _STATE).is_file():
                found.append((int(number[1]), folder))
        return sorted(found)
