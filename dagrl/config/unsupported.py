"""Fields of a library's config that a pipeline file may not set, or only to some values: the form of such a rule."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Clash:
    """Fields that share a reason."""

    fields: tuple[str, ...]
    reason: str
    """What is wrong and what to do: ends the sentence that begins with the field's name."""
    harmless: tuple[Any, ...] = ()
    """Values that may be given all the same; of a list, values that its entries may have."""
    where: Callable[[Any], bool] = lambda engine: True
    """The engines that it concerns."""

    def hits(self, engine: Any, field: str, value: Any) -> bool:
        """Whether this value of the field is refused in this engine."""
        if field not in self.fields or not self.where(engine):
            return False
        values = value if isinstance(value, list) and value else [value]
        return not all(_is_one_of(each, self.harmless) for each in values)


def _is_one_of(value: Any, known: tuple[Any, ...]) -> bool:
    # In Python 1 == True, but to a library a number is no switch.
    return any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in known)
