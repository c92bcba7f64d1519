"""Problems of a pipeline file, and the words that their messages share. `loading/positions.py` knows the lines."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass

from dagrl.redact import hide_secrets

Place = tuple[str | int, ...]
"""Keys and list indices that lead to a value of the pipeline file."""


@dataclass(frozen=True, slots=True, order=True)
class Problem:
    """One problem. Prints as ``FILE:LINE: where.in.the.file: what is wrong; what to do``."""

    file: str
    line: int
    place: str
    message: str
    code: str = ""
    """A stable name of this kind of problem, for tests and tools: ``unknown-key``, ``missing-column``."""

    def __str__(self) -> str:
        return in_one_line("{file}:{line}: {place}: {message}".format(**self.as_values()))

    def as_values(self) -> dict[str, str | int]:
        """Return the fields, with long texts cut, as they are printed."""
        file, place = _cut(self.file, _MOST_SHOWN), _cut(hide_secrets(self.place), _MOST_SHOWN)
        return {"file": file, "line": self.line, "place": place, "message": bounded(self.message), "code": self.code}


class Removal(str):
    """A message whose remedy is to remove the key."""

    why: str
    """The message without its remedy."""


def removal(why: str, instead: str = "", *, key: str = "") -> str:
    """The message ``WHY; remove it``, or ``WHY; INSTEAD, or remove it``. A template's key can also be reset to null.

    `key` is the last one of the place, which the message then names.
    """
    message = Removal(f"{why}; {instead}{', or ' if instead else ''}remove {f'`{key}`' if key else 'it'}")
    message.why = why
    return message


class PipelineError(ValueError):
    """A pipeline that cannot run as it is written, with each problem once, by file and line."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(sorted(set(problems)))
        assert self.problems, "a PipelineError without a problem"
        super().__init__("\n".join(str(problem) for problem in self.problems))

    def __reduce__(self) -> tuple[type[PipelineError], tuple[tuple[Problem, ...]]]:
        return type(self), (self.problems,)


_MOST_SHOWN, _MOST_SAID = 500, 4000
"""Characters of a key or value, and of a message."""
_WORD = re.compile(rf"\S{{{_MOST_SHOWN + 1},}}")


def _cut(text: str, most: int) -> str:
    """Shorten a text to `most` characters: a key or value of a file may have any length."""
    return text if len(text) <= most else f"{text[: most // 2]}...{text[-most // 2 :]}"


def _cut_word(word: re.Match[str]) -> str:
    return _cut(word[0], _MOST_SHOWN)


def bounded(message: str) -> str:
    """Shorten a message that echoes something of any length, first each long word and then the whole; hide secrets."""
    return _cut(_WORD.sub(_cut_word, hide_secrets(message)), _MOST_SAID)


def in_one_line(text: str) -> str:
    """Escape line breaks and other invisible characters."""
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def dotted(place: Place) -> str:
    """Format a place as ``engines.actor.optimizer.lr`` or ``track[1]``; the empty place is ``file``."""
    text = ""
    for key in place:
        text += f"[{key}]" if isinstance(key, int) else f".{key}" if text else key
    return text or "file"


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known name that `word` most likely means: one that starts with it, or has a similar spelling."""
    folded = {name.casefold(): name for name in known}
    begun = _begun_by(word, folded)
    close = [begun[0]] if len(begun) == 1 else difflib.get_close_matches(word.casefold(), folded, n=1, cutoff=0.6)
    return folded[close[0]] if close else None


def suggest(word: str, known: Iterable[str]) -> str:
    """The remedy for an unknown name: the nearest known names, or all of them."""
    names = list(dict.fromkeys(known))
    begun = _begun_by(word, names)
    if 2 <= len(begun) <= 3:
        return f"did you mean {' or '.join(f'`{name}`' for name in begun)}?"
    if len(begun) < 2 and (near := nearest(word, names)):
        return f"did you mean `{near}`?"
    return f"choose from: {', '.join(begun or names)}" if names else "there are no names to choose from"


def _begun_by(word: str, names: Iterable[str]) -> list[str]:
    """Names that start with `word`, if it has more than two letters."""
    return [name for name in names if len(word) > 2 and name.casefold().startswith(word.casefold())]


def listed(names: Iterable[str]) -> str:
    """Join names for a sentence: ```a` and `b```."""
    quoted = [f"`{name}`" for name in names]
    return " and ".join([", ".join(quoted[:-1]), quoted[-1]] if len(quoted) > 1 else quoted)


def counted(number: float, noun: str) -> str:
    """Format a number with a noun: ``1 request``, ``1,000 requests``."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def shown(value: object) -> str:
    """Format a value as in YAML, shortened."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list):
        return "a list"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
