"""Objects of other processes, waited for with a bound."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ray


class ObjectsLateError(TimeoutError):
    """Objects do not come: whoever holds them, or the way from there, is of no use any more."""


def get_within(refs: Sequence[ray.ObjectRef], timeout_s: float, what: str) -> list[Any]:
    """What `refs` stand for, in their order.

    ObjectsLateError, which calls them `what`, after `timeout_s`, or where a process that was to make them has died.
    All at once: objects come side by side then, and each call costs as much as an object of moderate size.
    """
    try:
        return ray.get(list(refs), timeout=timeout_s) if refs else []
    except ray.exceptions.GetTimeoutError as error:
        raise ObjectsLateError(f"waited {timeout_s:g} s for {what}, out of Ray's object store") from error
    except ray.exceptions.RayActorError as error:
        raise ObjectsLateError(f"the process that was asked for {what} has died") from error
