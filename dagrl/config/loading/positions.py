"""From places in a pipeline to lines in its files, and the collector of findings that every check reports to."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from dagrl.config.errors import PipelineError, Place, Problem, dotted

COMMAND_LINE = "command line"
"""Stands for the file of what an override says; its line is the override's number."""

_OUT = re.compile(r"take (?:it|`([^`]+)`) out$")


@dataclass(frozen=True, slots=True)
class Position:
    """Where a key or value was written."""

    file: str
    line: int
    override: str | None = None
    """The whole ``KEY=VALUE`` if it came from the command line."""

    @property
    def folder(self) -> Path:
        """What a relative path written there is relative to."""
        return Path() if self.override else Path(self.file).parent


@dataclass(frozen=True, slots=True)
class Positions:
    """Position of every place of a pipeline; of places that nobody wrote, that of the section around them."""

    known: Mapping[Place, Position]

    def at(self, place: Place) -> Position:
        """The position of a place, or of the nearest section around it."""
        while place and place not in self.known:
            place = place[:-1]
        return self.known.get(place, Position("pipeline", 1))

    def problem(self, place: Place, message: str) -> Problem:
        """A problem at a place."""
        position = self.at(place)
        shown = dotted(place)
        if position.override:
            key = position.override.partition("=")[0]
            # Of an override with a whole section, which key of it.
            within = f": {shown}" if shown.startswith(f"{key}.") else ""
            shown = f"override {position.override}{within}"
        return Problem(position.file, position.line, shown, message + self._where_inherited(place, message))

    def _where_inherited(self, place: Place, message: str) -> str:
        """What else to do where something is to be taken out that stands in a template: that is others' file."""
        out, written, own = _OUT.search(message), self.known.get(place), self.known.get(())
        if not (out and written and own) or written.override or written.file == own.file:
            return ""
        key = place[-1]
        return f", or write `{key}: null` in {Path(own.file).name}" if out[1] in (None, key) else ""


class Findings:
    """Problems and warnings found so far. One mistake is told once: what only follows from another stays silent."""

    def __init__(self, positions: Positions, problems: Iterable[Problem] = (), broken: Iterable[Place] = ()) -> None:
        self._positions = positions
        self._broken = _Places(broken)
        self._doubtful = _Places(self._broken.exact)
        self.problems = list(problems)
        self.warnings: list[Problem] = []

    def error(self, place: Place, message: str, *, depends_on: Iterable[Place] = ()) -> None:
        """Report a problem, unless `place`, or a place that the rule looks at too, is known to be wrong already."""
        if self.trusted(*depends_on) and self.readable(place):
            self.problems.append(self._positions.problem(place, message))
        self._doubtful.add(place)

    def warning(self, place: Place, message: str, *, depends_on: Iterable[Place] = ()) -> None:
        """Report something odd that does not hinder a run."""
        if self.trusted(place, *depends_on):
            self.warnings.append(self._positions.problem(place, message))

    def trusted(self, *places: Place) -> bool:
        """Whether nothing wrong is known of these places, of what is in them, and of what they are in."""
        return not any(map(self._doubtful.touch, places))

    def readable(self, place: Place) -> bool:
        """Whether everything at a place could be read as it is written."""
        return not self._broken.touch(place)

    def raise_if_any(self) -> None:
        """PipelineError with all problems, if there are any."""
        if self.problems:
            raise PipelineError(self.problems)


class _Places:
    """A set of places that finds those within or around another place without looking at each."""

    def __init__(self, places: Iterable[Place]) -> None:
        self.exact: set[Place] = set()
        self._around: set[Place] = set()
        for place in places:
            self.add(place)

    def add(self, place: Place) -> None:
        self.exact.add(place)
        self._around.update(place[:depth] for depth in range(len(place) + 1))

    def touch(self, place: Place) -> bool:
        """Whether one of the places is `place`, within it or around it."""
        return place in self._around or any(place[:depth] in self.exact for depth in range(len(place)))
