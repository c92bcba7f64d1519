"""The response that a rollout waited for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dagrl.reporting.run_data.sample_view import sample_file
from dagrl.reporting.why.critical_path import STRAGGLER, Part

_ALIKE = 0.8
"""Responses differ little in length if the mean is more than this share of the longest."""


@dataclass(frozen=True, slots=True)
class Straggler:
    """The step that waited longest for its last responses."""

    step: int
    seconds: float
    """In which the last shard of the rollout was alone."""
    longest: float | None
    """Tokens of the longest response; None if the run does not say."""
    mean: float | None
    """Tokens of the mean response."""
    samples: tuple[int, ...]
    """Ids of stored samples with that many tokens, if they are few."""

    def sentence(self) -> str:
        if self.longest is None or self.mean is None:
            return f"the rollout of step {self.step} waited {self.seconds:,.2f} s for its last responses"
        text = f"step {self.step}: the longest response has {self.longest:,.0f} tokens"
        if self.samples:
            text += f" (sample {', '.join(map(str, self.samples))})"
        text += f", the mean one {self.mean:,.0f}"
        if self.mean > _ALIKE * self.longest:
            text += ": lengths are alike, so that a tool, an environment or a server is late"
        return text


_MOST_NAMED = 3


def straggler(
    folder: Path, paths: Mapping[int, Sequence[Part]], metrics: Mapping[int, Mapping[str, Any]]
) -> Straggler | None:
    """Find it by the steps' critical paths and metrics, and by the samples that the run has stored."""
    waits = {
        step: sum(part.end - part.start for part in path if part.cause == STRAGGLER) for step, path in paths.items()
    }
    step = max(waits, key=waits.__getitem__, default=None)
    if step is None or not waits[step]:
        return None
    line = metrics.get(step, {})
    longest = line.get("response_tokens/max")
    samples = _stored(folder, step, longest) if longest else ()
    few = samples if len(samples) <= _MOST_NAMED else ()
    return Straggler(step, waits[step], longest, line.get("response_tokens/mean"), few)


def _stored(folder: Path, step: int, tokens: float) -> tuple[int, ...]:
    """Ids of the step's stored samples with so many tokens; none if there is no readable file."""
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    try:
        path = sample_file(folder, step)
        if path is None:
            return ()
        table = pq.read_table(path, columns=["sample_id", "response_tokens"])
    except (pa.ArrowInvalid, ValueError, OSError):
        return ()
    lengths = pc.list_value_length(table["response_tokens"]).to_pylist()
    ids = table["sample_id"].to_pylist()
    return tuple(number for number, length in zip(ids, lengths, strict=True) if length == tokens)
