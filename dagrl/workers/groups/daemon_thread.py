"""Calls that may never return, for a loop that waits for them no longer than it wants to."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any


async def apart[Result](function: Callable[..., Result], *arguments: Any) -> Result:
    """As `asyncio.to_thread`, in a thread that nobody waits for when the loop, or the process, ends.

    Python would wait for those of `to_thread`: minutes for the loop's end, and for ever for the process's.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Result] = loop.create_future()

    def settle(how: Callable[[Any], None], value: object) -> None:
        if not future.done():
            how(value)

    def tell(how: Callable[[Any], None], value: object) -> None:
        with suppress(RuntimeError):  # the loop is over: nobody wants to know
            loop.call_soon_threadsafe(settle, how, value)

    def work() -> None:
        try:
            result = function(*arguments)
        except BaseException as failure:  # noqa: BLE001 - handed to whoever awaits it
            tell(future.set_exception, failure)
        else:
            tell(future.set_result, result)

    threading.Thread(target=work, name=f"apart {getattr(function, '__name__', '')}", daemon=True).start()
    return await future
