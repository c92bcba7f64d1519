"""The share of the prompts that one of several explorers takes."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Share:
    """Which of several explorers, each of which takes other rows of each source."""

    number: int = 1
    of: int = 1

    @staticmethod
    def parse(text: str) -> Share:
        """Read ``2/3``. ValueError for anything else."""
        found = re.fullmatch(r"(\d+)/(\d+)", text, re.ASCII)
        if found is None or not 1 <= (number := int(found[1])) <= (of := int(found[2])):
            raise ValueError(f"{text!r} is no explorer; write its number and how many there are, such as 2/3")
        return Share(number, of)

    def rows(self, count: int) -> int:
        """How many of `count` rows it takes: every `of`-th one."""
        return len(range(self.number - 1, count, self.of))

    def __str__(self) -> str:
        """The explorer's name in files: ``2of3``."""
        return f"{self.number}of{self.of}"


ALL = Share()
"""That of a run without explorers."""
