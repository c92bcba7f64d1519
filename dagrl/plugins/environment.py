"""Environments: user classes that answer a policy turn by turn, and reward it.

A pipeline names one as ``module:Class``. Each response gets an instance, used by one thread at a time.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from dagrl.plugins.custom import UserFunction, check_call, known_parameters, load_function

RESET_FIELDS = ("prompt", "answer", "data_source", "extra_info", "seed")
"""Keyword arguments that ``reset`` may take."""


@dataclass(frozen=True, slots=True)
class Observation:
    """The answer of an environment."""

    text: str | None = None
    """The text for the policy; None ends the response, as `done` does."""
    reward: float = 0.0
    """The reward of the turn."""
    done: bool = False
    """Whether the response ends with this turn, without the text."""
    images: tuple[object, ...] = ()
    """Images (PIL) before the text, for vision models."""

    def __post_init__(self) -> None:
        if not isinstance(self.text, str | None):
            raise TypeError(f"an observation's text is a string or None, not {self.text!r}")
        if isinstance(self.reward, bool) or not math.isfinite(self.reward):
            raise ValueError(f"an observation's reward is a finite number, not {self.reward!r}; use float(...)")

    @property
    def ends(self) -> bool:
        """Whether the response ends with this turn."""
        return self.done or self.text is None


class Environment(Protocol):
    """The interface of an environment. An optional ``close()`` is called at the end."""

    def reset(self, **fields: object) -> None:
        """Start an episode. `fields` are the `RESET_FIELDS` among its parameters; `seed` differs by response."""

    def step(self, response: str) -> Observation:
        """Answer the policy's text of one turn, without the token that ended it."""


@dataclass(frozen=True, slots=True)
class EnvironmentClass:
    """A user's class, and the arguments of its instances."""

    place: str
    """``module:Class``"""
    make: Any
    args: Mapping[str, object]
    fields: tuple[str, ...]
    """Arguments of its ``reset``."""

    def __call__(self) -> Environment:
        """A new instance. Raises any exception of the user's constructor."""
        return self.make(**self.args)


def load_environment(place: str, args: Mapping[str, object], folder: Path | None = None) -> EnvironmentClass:
    """The class at ``module:Class``. ValueError as in `environment_fields`."""
    made = load_function(place, folder)
    return EnvironmentClass(place, made, args, environment_fields(made, place, args))


def environment_fields(made: UserFunction, place: str, args: Mapping[str, object]) -> tuple[str, ...]:
    """The fields that the ``reset`` of a class takes. ValueError if it is not a class, or a method does not fit."""
    if not inspect.isclass(made):
        raise ValueError(f"`{place}` is no class; an environment is one with reset(...) and step(response)")
    methods: dict[str, Any] = {name: getattr(made, name, None) for name in ("reset", "step")}
    for name, method in methods.items():
        if not callable(method):
            raise ValueError(f"`{place}` has no method {name}; an environment has reset(...) and step(response)")
    check_call(made, place, "fix environment_args", (), args)
    fields = known_parameters(functools.partial(methods["reset"], None), f"{place}.reset", RESET_FIELDS)
    check_call(methods["step"], f"{place}.step", "fix the method", (None, ""), {})
    return fields
