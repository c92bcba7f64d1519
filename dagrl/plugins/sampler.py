"""Samplers of the user: classes that decide which prompts each step takes.

A pipeline names one as ``module:Class`` in ``data.order``. `dagrl.data.order.own` calls it.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping

from dagrl.plugins.custom import UserFunction, check_call

_NEEDED = "take(count, step), state() and load(state), and may have observe(rows)"
_METHODS = {"take": 3, "state": 1, "load": 2}
"""Methods that a sampler must have, and how many arguments they get."""


def check_sampler(made: UserFunction, place: str, args: Mapping[str, object]) -> None:
    """ValueError if it is no class, its constructor does not take `args`, or a method does not fit."""
    if not inspect.isclass(made):
        raise ValueError(f"`{place}` is no class; a sampler is one with {_NEEDED}")
    check_call(made, place, "a sampler is made with (sources, seed, **args)", ({}, 0), args)
    for name, count in (_METHODS | ({"observe": 2} if hasattr(made, "observe") else {})).items():
        method = getattr(made, name, None)
        if not callable(method):
            raise ValueError(f"`{place}` has no method {name}; a sampler has {_NEEDED}")
        check_call(method, f"{place}.{name}", f"a sampler has {_NEEDED}", (None,) * count, {})
