"""Agents: async functions that solve a row's task with a client of the policy.

A pipeline names one as ``module:function``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any


def check_agent(function: Callable[..., Any], place: str, args: Mapping[str, Any]) -> None:
    """ValueError unless the function is async and takes a client, a row and `args`."""
    if not inspect.iscoroutinefunction(inspect.unwrap(function)):
        raise ValueError(f"the agent `{place}` is not declared with `async def`; it gets an async client")
    try:
        inspect.signature(function).bind(None, {}, **args)
    except TypeError as error:
        raise ValueError(f"`{place}` cannot be called: {error}; an agent gets a client, the row and `args`") from error
