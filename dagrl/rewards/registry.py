"""Reward functions by the name that a pipeline gives them: dagrl's own, or ``module:function``."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dagrl.config.reward_names import BUILT_IN_REWARDS
from dagrl.graph.plugins.custom import load_function


def load_reward(fn: str, folder: Path | None = None) -> Callable[..., Any]:
    """The reward function that a node's ``fn`` names; modules of the user's own are also looked for in `folder`.

    Raises ValueError for a name that is not there.
    """
    if ":" in fn:
        return load_function(fn, folder)
    if fn not in BUILT_IN_REWARDS:
        close = difflib.get_close_matches(fn, BUILT_IN_REWARDS, n=1)
        hint = f"did you mean {close[0]}?" if close else "your own are written module:function"
        raise ValueError(f"there is no reward {fn!r}, only {', '.join(BUILT_IN_REWARDS)}; {hint}")
    return load_function(BUILT_IN_REWARDS[fn])
