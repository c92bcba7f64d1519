"""verl's reward for `published_curve.py`: dagrl's strict `math` on plain numbers."""

from __future__ import annotations

from typing import Any


def compute_score(data_source: str, solution_str: str, ground_truth: str, **rest: Any) -> float:
    """1 if the number behind the last ``####`` is the right one."""
    said = solution_str.rpartition("####")
    return float(bool(said[1]) and said[2].removesuffix("<|im_end|>").strip() == ground_truth)
