"""Environments: what answers a policy turn by turn, in classes of the user's own, and rewards it.

A pipeline names one as ``module:Class``. Each response gets one of its own, used by one thread at a time.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from dagrl.config.errors import suggest
from dagrl.graph.plugins.custom import check_returns, load_function, signature_of

RESET_FIELDS = ("prompt", "answer", "data_source", "extra_info", "seed")
"""What ``reset`` may ask for, by the names of its parameters."""


@dataclass(frozen=True, slots=True)
class Observation:
    """What an environment answers."""

    text: str | None = None
    """What the policy is told; None where there is nothing more to say, which ends the response as `done` does."""
    reward: float = 0.0
    """Of the turn that it answers."""
    done: bool = False
    """Whether the response ends with that turn; the policy does not see the text then."""

    def __post_init__(self) -> None:
        if not isinstance(self.text, str | None):
            raise TypeError(f"an observation's text is a string or None, not {self.text!r}")
        if isinstance(self.reward, bool) or not math.isfinite(self.reward):
            raise ValueError(f"an observation's reward is a finite number, not {self.reward!r}; use float(...)")

    @property
    def ends(self) -> bool:
        """Whether the response ends with the turn that it answers."""
        return self.done or self.text is None


class Environment(Protocol):
    """What a class has to have. It may have ``close()`` too, which is called once nobody asks it any more."""

    def reset(self, **fields: Any) -> None:
        """Begin: `fields` are those of `RESET_FIELDS` that the parameters name. `seed` is the response's own."""
        ...

    def step(self, response: str) -> Observation:
        """Answer what the policy has said in its turn, without the token that ended it."""
        ...


@dataclass(frozen=True, slots=True)
class EnvironmentClass:
    """A class of the user's, and with what it is made."""

    place: str
    """``module:Class``"""
    make: Any
    args: Mapping[str, Any]
    fields: tuple[str, ...]
    """What its ``reset`` takes."""

    def __call__(self) -> Environment:
        """One for a response. Raises what the user's constructor raises."""
        return self.make(**self.args)


def load_environment(place: str, args: Mapping[str, Any], folder: Path | None = None) -> EnvironmentClass:
    """The class at ``module:Class``. ValueError where it is none, or lacks or misunderstands a method."""
    made = load_function(place, folder)
    if not inspect.isclass(made):
        raise ValueError(f"`{place}` is no class; an environment is one with reset(...) and step(response)")
    for method in ("reset", "step"):
        if not callable(getattr(made, method, None)):
            raise ValueError(f"`{place}` has no method {method}; an environment has reset(...) and step(response)")
        check_returns(getattr(made, method), f"{place}.{method}")
    _check_call(place, made, "environment_args", **args)
    reset, step = (getattr(made, method) for method in ("reset", "step"))
    _check_call(f"{place}.step", step, "the method", None, "")
    parameters = [*signature_of(reset, f"{place}.reset").parameters.values()][1:]
    if any(each.kind is each.VAR_KEYWORD for each in parameters):
        return EnvironmentClass(place, made, args, RESET_FIELDS)
    for each in parameters:
        if each.kind is each.POSITIONAL_ONLY:
            message = f"`{place}.reset` takes {each.name!r} by position, and arguments are given by name"
            raise ValueError(f"{message}; take the `/` out")
        if each.name not in RESET_FIELDS and each.default is each.empty:
            known = suggest(each.name, RESET_FIELDS)
            raise ValueError(f"`{place}.reset` wants {each.name!r}, which no row has; {known}")
    named = {each.name for each in parameters}
    return EnvironmentClass(place, made, args, tuple(field for field in RESET_FIELDS if field in named))


def environment_fields(place: str, args: Mapping[str, Any], folder: Path | None = None) -> tuple[str, ...]:
    """The fields that ``reset`` of the class at ``module:Class`` takes. ValueError like `load_environment`."""
    return load_environment(place, args, folder).fields


def _check_call(what: str, function: Any, remedy: str, *args: Any, **kwargs: Any) -> None:
    signature = signature_of(function, what)
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise ValueError(f"`{what}` cannot be called: {error}; mend {remedy}") from error
