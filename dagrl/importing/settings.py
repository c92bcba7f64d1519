"""Settings of a source: keys and values with their files and lines."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import yaml

_NUMBER = re.compile(r"[-+]?([0-9][0-9_]*\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?")
_MOST_DIGITS = 300
"""Longer numbers are read as text: no setting has one, and Python limits the digits that it reads."""
_WORDS = {"true": True, "false": False, "null": None, "none": None, "~": None, "": None}


class ImportProblem(ValueError):  # noqa: N818 (a problem of the user's file, as elsewhere in dagrl)
    """A source that cannot be translated at all."""


@dataclass(frozen=True, slots=True)
class Unresolved:
    """A value that depends on the script's environment: a variable that it does not set, or a program's output."""

    text: str
    """The value, with ``$NAME`` for unknown parts."""
    missing: tuple[str, ...]
    """Variables and commands on which it depends."""

    def __str__(self) -> str:
        return self.text


def why_unknown(names: tuple[str, ...]) -> str:
    """The reason for an unknown value that depends on variables, arguments and commands, and the remedy."""
    variables = [name[1:] for name in names if re.fullmatch(r"\$[A-Za-z_]\w*", name)]
    if variables:
        return f"the script does not set {', '.join(variables)}; give --set {variables[0]}=VALUE"
    arguments = [name for name in names if re.fullmatch(r"\$\d+", name)]
    if arguments:
        return f"the script takes {', '.join(arguments)} from its call; give its arguments after its name"
    return f"is the output of {', '.join(names)}, which an import does not execute"


@dataclass(frozen=True, slots=True)
class Word:
    """A word of a command, after expansion."""

    text: str
    """The word, with ``$NAME`` or ``$(command)`` for unknown parts."""
    file: str
    line: int
    missing: tuple[str, ...] = ()
    """Unknown variables and commands in it."""

    @property
    def value(self) -> str | Unresolved:
        return Unresolved(self.text, self.missing) if self.missing else self.text


@dataclass(frozen=True, slots=True)
class Remark:
    """A part of a script that was not read, or may run differently, and the reason."""

    file: str
    line: int
    message: str


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting of a source."""

    key: str
    value: Any
    """A scalar, a list, or an `Unresolved`."""
    file: str
    line: int

    @property
    def place(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass
class Settings:
    """The settings of a source by key; the last of several values wins, as in all of these frameworks."""

    by_key: dict[str, Setting] = field(default_factory=dict)

    @classmethod
    def of(cls, settings: Iterable[Setting]) -> Settings:
        made = cls()
        for setting in settings:
            made.add(setting)
        return made

    def add(self, setting: Setting) -> None:
        self.by_key.pop(setting.key, None)
        self.by_key[setting.key] = setting

    def remove(self, key: str) -> None:
        """Forget a key and the keys below it, as Hydra's ``~key`` does."""
        for removed in [name for name in self.by_key if name == key or name.startswith(f"{key}.")]:
            del self.by_key[removed]

    def value(self, key: str) -> Any:
        return self.by_key[key].value if key in self.by_key else None

    def __iter__(self) -> Iterator[Setting]:
        return iter(self.by_key.values())

    def __contains__(self, key: str) -> bool:
        return key in self.by_key


def parse_scalar(text: str) -> object:
    """Read a value of a command line like Hydra: numbers, booleans, null, lists, or text."""
    stripped = text.strip()
    if stripped.casefold() in _WORDS:
        return _WORDS[stripped.casefold()]
    if len(stripped) <= _MOST_DIGITS and _NUMBER.fullmatch(stripped):
        number = stripped.replace("_", "")
        return int(number) if re.fullmatch(r"[-+]?[0-9]+", number) else float(number)
    if stripped[:1] in "[{" and stripped[-1:] in "]}":
        return _parse_collection(stripped)
    if len(stripped) > 1 and stripped[0] == stripped[-1] and stripped[0] in "'\"":
        return stripped[1:-1]
    return stripped


def _parse_collection(text: str) -> object:
    try:
        return normalized(yaml.safe_load(text))
    except (yaml.YAMLError, ValueError, LookupError, ArithmeticError, AttributeError):
        return text


def normalized(value: object) -> object:
    """Return a YAML value in which texts such as ``1e-6`` become numbers, as the frameworks read them.

    ValueError for a number that is too long.
    """
    if isinstance(value, dict):
        return {str(key): normalized(part) for key, part in value.items()}
    if isinstance(value, list):
        return [normalized(part) for part in value]
    if isinstance(value, str) and _NUMBER.fullmatch(value.strip()) and not value.strip().isdigit():
        return parse_scalar(value)
    if isinstance(value, int) and abs(value) >= 10**_MOST_DIGITS:
        raise ValueError(f"a number of more than {_MOST_DIGITS} digits")
    return value if isinstance(value, int | float | str | bool | None) else str(value)
