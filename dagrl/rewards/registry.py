"""Finds reward functions by name: built-in ones, or ``module:function``."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dagrl.config.reward_names import BUILT_IN_REWARDS
from dagrl.plugins.custom import load_function


def load_reward(fn: str, folder: Path | None = None) -> Callable[..., Any]:
    """The reward function named by a node's ``fn``; user modules are also searched in `folder`.

    Raises ValueError for an unknown name.
    """
    if ":" in fn:
        return load_function(fn, folder)
    if fn not in BUILT_IN_REWARDS:
        close = difflib.get_close_matches(fn, BUILT_IN_REWARDS, n=1)
        hint = f"did you mean {close[0]}?" if close else "your own are written module:function"
        raise ValueError(f"there is no reward {fn!r}; built-in rewards are {', '.join(BUILT_IN_REWARDS)}; {hint}")
    return load_function(BUILT_IN_REWARDS[fn])
