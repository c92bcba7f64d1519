"""Maps places of a pipeline to lines of its files, and collects the problems that the checks find there."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from dagrl.config.errors import PipelineError, Place, Problem, Removal, dotted, removal, suggest

COMMAND_LINE = "command line"
"""Replaces the file name of a problem in an override; the line is the override's number."""


@dataclass(frozen=True, slots=True)
class Position:
    """The position of a key or value."""

    file: str
    line: int
    override: str | None = None
    """The whole ``KEY=VALUE`` if the position is on the command line."""

    @property
    def folder(self) -> Path:
        """The folder that relative paths written here refer to."""
        return Path() if self.override else Path(self.file).parent


@dataclass(frozen=True, slots=True)
class Positions:
    """Positions of all places that were written; any other place has the position of the section around it."""

    known: Mapping[Place, Position]

    def at(self, place: Place) -> Position:
        """The position of a place, or of the nearest section around it."""
        while place and place not in self.known:
            place = place[:-1]
        return self.known.get(place, Position("pipeline", 1))

    def overrules(self, place: Place, other: Place) -> bool:
        """Whether a place is written nearer to the call than another: in the file itself, or on the command line."""
        own = self.known[()].file
        nearness = [1 if at.file == own else 2 if at.override else 0 for at in map(self.at, (place, other))]
        return nearness[0] > nearness[1]

    def problem(self, place: Place, message: str, code: str = "") -> Problem:
        """A problem at a place."""
        position, text = self.at(place), dotted(place)
        if position.override:
            key = position.override.partition("=")[0]
            within = f": {text}" if text.startswith(f"{key}.") else ""
            text = f"override {position.override}{within}"
        written, own = self.known.get(place), self.known.get(())
        if isinstance(message, Removal) and written and own and not written.override and written.file != own.file:
            # The other file may be a template, which users do not edit.
            message = f"{message}, or write `{place[-1]}: null` in {Path(own.file).name}"
        return Problem(position.file, position.line, text, str(message), code)


class Findings:
    """Problems and warnings found so far."""

    def __init__(self, positions: Positions) -> None:
        self._positions = positions
        self._wrong: list[Place] = []
        self.problems: list[Problem] = []
        self.warnings: list[Problem] = []

    def error(self, place: Place, message: str, code: str = "", *, depends_on: Iterable[Place] = ()) -> None:
        """Report a problem, unless it only follows from one already reported at a place in `depends_on`."""
        if self.trusted(*depends_on):
            self.problems.append(self._positions.problem(place, message, code))
        self._wrong.append(place)

    def superfluous(self, place: Place, why: str, instead: str = "", *, depends_on: Iterable[Place] = ()) -> None:
        """Report an option that has no effect; `instead` is another remedy than to remove it."""
        self.error(place, removal(why, instead), "option-without-effect", depends_on=depends_on)

    def unknown(self, place: Place, kind: str, name: str, known: Iterable[str]) -> None:
        """Report a name of a group, engine, node or tool that is none of `known`."""
        self.error(place, f"there is no {kind} `{name}`; {suggest(name, known)}", f"unknown-{kind}")

    @contextmanager
    def reporting(self, place: Place, code: str) -> Iterator[None]:
        """Context that reports a ValueError as a problem."""
        try:
            yield
        except ValueError as error:
            self.error(place, str(error), code)

    def warning(self, place: Place, message: str, code: str = "", *, depends_on: Iterable[Place] = ()) -> None:
        """Report something suspicious that does not prevent a run."""
        if self.trusted(place, *depends_on):
            self.warnings.append(self._positions.problem(place, message, code))

    def trusted(self, *places: Place) -> bool:
        """Whether no problem is reported at these places, inside them or around them."""
        return not any(wrong[: len(place)] == place[: len(wrong)] for wrong in self._wrong for place in places)

    def raise_if_any(self) -> None:
        """Raise PipelineError with all problems, if there are any."""
        if self.problems:
            raise PipelineError(self.problems)
