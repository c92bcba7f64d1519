"""Samplers of the user: classes that choose the prompts of each step.

A pipeline names one as ``module:Class`` in ``data.order``. `dagrl.data.order.own` calls it.
"""

from __future__ import annotations

from collections.abc import Mapping

from dagrl.plugins.custom import UserFunction, check_call, check_methods

_NEEDED = "take(count, step), state() and load(state), and may have observe(rows)"
_METHODS = {"take": 3, "state": 1, "load": 2}
"""Required methods of a sampler -> number of their arguments."""


def check_sampler(made: UserFunction, place: str, args: Mapping[str, object]) -> None:
    """ValueError if it is not a class, its constructor does not take `args`, or a method does not fit."""
    methods = _METHODS | ({"observe": 2} if hasattr(made, "observe") else {})
    check_methods(made, place, "a sampler", _NEEDED, methods)
    check_call(made, place, "a sampler is made with (sources, seed, **args)", ({}, 0), args)
