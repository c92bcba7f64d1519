"""verl's reward for the comparison: `interludes.noise`, which dagrl's pipelines have."""

from __future__ import annotations

import zlib
from typing import Any


def compute_score(data_source: str, solution_str: str, ground_truth: str, **rest: Any) -> float:
    """0 or 1, by the response's text alone: random weights give no right answers."""
    return float(zlib.crc32(solution_str.encode(errors="replace")) & 1)
