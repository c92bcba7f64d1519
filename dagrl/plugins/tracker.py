"""Trackers of the user: classes that receive the metrics of a run.

A pipeline names one as ``module:Class``. `dagrl.tracking.base.Tracker` is its interface.
"""

from __future__ import annotations

from collections.abc import Mapping

from dagrl.plugins.custom import UserFunction, check_call, check_methods

_NEEDED = "start(run_dir, config, resumed_step), log(step, metrics) and close(ok), and may have samples(step, table)"
_METHODS = {"start": 4, "log": 3, "close": 2}
"""Required methods of a tracker -> number of their arguments."""


def check_tracker(made: UserFunction, place: str, args: Mapping[str, object]) -> None:
    """ValueError if it is not a class, its constructor does not take `args`, or a method does not fit."""
    check_methods(made, place, "a tracker", _NEEDED, _METHODS | ({"samples": 3} if hasattr(made, "samples") else {}))
    check_call(made, place, "fix the tracker's args", (), args)
