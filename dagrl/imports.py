"""Importing what takes seconds, for less. Every worker of a run does it anew: torch, transformers and megatron."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def lean_imports(*hidden: str, for_good: bool = False) -> Iterator[None]:
    """Import in this block without a look for garbage, and as if there were none of the packages `hidden`.

    The collector goes through everything whenever there is a quarter more of it. While thousands of modules come in,
    that is a quarter of the time, and modules stay. Packages that somebody has imported before are not hidden; they can
    be imported again after the block. `for_good`: neither is there a look at any of it later, as where a process has
    nothing else yet.
    """
    collects = gc.isenabled()
    gc.disable()
    absent = set(hidden) - sys.modules.keys()
    # A name that stands for None cannot be imported.
    sys.modules.update(dict.fromkeys(absent))  # type: ignore[arg-type]
    try:
        yield
    finally:
        for name in absent:
            sys.modules.pop(name, None)
        if for_good:
            gc.freeze()
        if collects:
            gc.enable()
