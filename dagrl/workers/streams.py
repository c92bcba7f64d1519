"""Streams of Ray's, read two objects at a time: one that stays where it is, and what is told of it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import ray


async def next_pair(stream: Any, read: Callable[[ray.ObjectRef], Awaitable[Any]]) -> tuple[ray.ObjectRef, Any] | None:
    """The first's ref and what the second is, by way of `read`; None behind the last pair. Raises the stream's failure.

    The second comes behind the first: to wait for it is to wait for both, once, where an iterator of Ray's would wait
    for each and then for what it is.
    """
    first, second = stream._get_next_ref_n(2)
    try:
        told = await read(second)
    except ray.exceptions.ObjectRefStreamEndOfStreamError:
        try:
            # A failure of the method itself comes in place of a pair.
            await read(first)
        except ray.exceptions.ObjectRefStreamEndOfStreamError:
            return None
        raise
    stream._consume_next_ref_n(2)
    return first, told
