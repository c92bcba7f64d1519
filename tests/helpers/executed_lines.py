"""What a piece of work costs, however busy the machine is: the lines that it executes.

Loops within C (sets, tuples) count as one line each; `benchmarks/simulate.py` measures those too.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import dagrl.planner

HERE = str(Path(dagrl.planner.__file__).parent)


def lines_of(work: Callable[[], Any]) -> int:
    """Lines of `dagrl.planner` that are executed."""
    count = 0

    def in_frame(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        count += event == "line"
        return in_frame

    def in_call(frame: FrameType, event: str, _: Any) -> Any:
        return in_frame if frame.f_code.co_filename.startswith(HERE) else None

    before = sys.gettrace()
    sys.settrace(in_call)
    try:
        work()
    finally:
        sys.settrace(before)
    return count
