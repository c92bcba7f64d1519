"""Trackers of the user: classes that get the metrics of a run.

A pipeline names one as ``module:Class``. `dagrl.tracking.base.Tracker` is its interface.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping

from dagrl.plugins.custom import UserFunction, check_call

_METHODS = {"start": 3, "log": 2, "close": 1}
"""Methods that a tracker must have, and how many arguments they get."""
_OPTIONAL = {"samples": 2}


def check_tracker(made: UserFunction, place: str, args: Mapping[str, object]) -> None:
    """ValueError if it is no class, its constructor does not take `args`, or a method does not fit."""
    needed = "start(run_dir, config, resumed_step), log(step, metrics) and close(ok)"
    if not inspect.isclass(made):
        raise ValueError(f"`{place}` is no class; a tracker is one with {needed}")
    check_call(made, place, "fix the tracker's args", (), args)
    for name, count in (_METHODS | _OPTIONAL).items():
        method = getattr(made, name, None)
        if method is None and name in _OPTIONAL:
            continue
        if not callable(method):
            raise ValueError(f"`{place}` has no method {name}; a tracker has {needed}")
        check_call(method, f"{place}.{name}", f"a tracker has {needed}", (None,) * (1 + count), {})
