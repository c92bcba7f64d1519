"""What a benchmark says in the end: lines to read, whether its aims are met, and the same as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class Verdict:
    """One figure and the aim it is held against."""

    what: str
    value: float
    sense: Literal["at least", "at most", "exactly"]
    aim: float

    @property
    def met(self) -> bool:
        """Whether the figure is as good as it should be."""
        if self.sense == "exactly":
            return self.value == self.aim
        return self.value >= self.aim if self.sense == "at least" else self.value <= self.aim

    def line(self) -> str:
        """For people."""
        return f"{'ok ' if self.met else 'NOT'} {self.what}: {self.value:.4g} ({self.sense} {self.aim:g})"


def device_name() -> str:
    """What it was measured on."""
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"


def tell(result: dict[str, Any], verdicts: list[Verdict], file: Path | None) -> None:
    """Print the verdicts, and everything as one line of JSON; write that to `file` too."""
    for verdict in verdicts:
        print(verdict.line())
    told = {"device": device_name()} | result
    line = json.dumps(told | {"verdicts": [asdict(verdict) | {"met": verdict.met} for verdict in verdicts]})
    print(line, flush=True)
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(line + "\n")
