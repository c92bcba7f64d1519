"""The user's own ops and rewards: how they are declared, found and imported.

A pipeline names them as ``module:function``; the module is looked for beside the pipeline file and on the Python path.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from dagrl.spec.ops import OpContract, Scope

Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class RewardTraits:
    """How a reward function wants to be called."""

    batched: bool = False


def node(
    *, reads: tuple[str, ...] | list[str], writes: tuple[str, ...] | list[str], scope: str = "row"
) -> Callable[[Function], Function]:
    """Declare a function as an op: ``function(batch, **args) -> {column: values}``.

    `scope` is ``row`` (may start on finished shards), ``group`` (needs all responses to a prompt) or ``batch``.
    Raises ValueError for an unknown scope.
    """
    contract = OpContract(tuple(reads), tuple(writes), Scope(scope))

    def mark(function: Function) -> Function:
        function.dagrl_contract = contract  # type: ignore[attr-defined]
        return function

    return mark


def reward(*, batched: bool = False) -> Callable[[Function], Function]:
    """Declare how a reward function is called: once a sample, or once a shard with lists (`batched`)."""

    def mark(function: Function) -> Function:
        function.dagrl_reward = RewardTraits(batched)  # type: ignore[attr-defined]
        return function

    return mark


def reward_traits(function: Callable[..., Any]) -> RewardTraits:
    """Traits of a reward function; an undecorated one is called once a sample."""
    return getattr(function, "dagrl_reward", RewardTraits())


def contract_of_function(function: Callable[..., Any], place: str) -> OpContract:
    """The contract that `node` put on a function; ValueError where it is missing."""
    contract = getattr(function, "dagrl_contract", None)
    if contract is None:
        raise ValueError(f"{place} is not decorated with @dagrl.node(reads=..., writes=...)")
    return contract


@contextmanager
def importable_from(folder: Path | None) -> Iterator[None]:
    """Let modules beside the pipeline file be imported within the context."""
    if folder is None:
        yield
        return
    entry = str(folder.resolve())
    sys.path.insert(0, entry)
    try:
        yield
    finally:
        sys.path.remove(entry)


def load_function(place: str, folder: Path | None = None) -> Callable[..., Any]:
    """Import ``module:function``. ValueError with one sentence where the module or the function is not there."""
    module_name, _, function_name = place.partition(":")
    try:
        with importable_from(folder):
            module = importlib.import_module(module_name)
    except ImportError as error:
        raise ValueError(f"cannot import {module_name!r} of {place!r}: {error}") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise ValueError(f"{module_name!r} has no function {function_name!r}")
    return function
