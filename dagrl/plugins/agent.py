"""Agents: async functions that solve a row's task with a client of the policy.

A pipeline names one as ``module:function``.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping

from dagrl.plugins.custom import UserFunction


def agent_problem(function: UserFunction, place: str, args: Mapping[str, object]) -> tuple[str | None, str] | None:
    """The wrong key (None for the function itself) and the reason; None if the function can be an agent with `args`.

    An agent is async and takes a client and a row.
    """
    if not inspect.iscoroutinefunction(inspect.unwrap(function)):
        return None, f"the agent `{place}` is not declared with `async def`; it gets an async client"
    try:
        inspect.signature(function).bind(None, {}, **args)
    except TypeError as error:
        why = f"`{place}` cannot be called: {error}; an agent gets a client, the row and `args`"
        return "args" if args else None, why
    return None
