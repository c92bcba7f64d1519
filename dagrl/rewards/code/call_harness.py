"""Calls the function of the solution, inside the sandbox, next to `solution.py`, and reports its results.

Reads {"name", "arguments", "timeout_s", "stops"} from standard input. Writes a line of JSON for each call: ``[value]``,
or ``null`` if the call raised or timed out. With ``stops``, the first ``null`` is the last line. The expected values
never enter the sandbox. Imports only the standard library.
"""

import builtins
import contextlib
import importlib.util
import json
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

# Modules that the editors of programming contests import by default.
_NAMES_OF = ("bisect", "collections", "functools", "heapq", "itertools", "math", "typing")
_MODULES = (*_NAMES_OF, "operator", "random", "re", "string", "sys")


def main() -> None:
    """Make all calls, then exit without running exit handlers of the solution."""
    order = json.load(sys.stdin)
    sys.setrecursionlimit(100_000)
    # Discard the solution's output.
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    signal.signal(signal.SIGALRM, _too_late)
    function = _function(order["name"])
    for arguments in order["arguments"]:
        reply = "null"
        with contextlib.suppress(BaseException):
            signal.setitimer(signal.ITIMER_REAL, order["timeout_s"])
            reply = json.dumps([function(*arguments)], default=_plain)
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(reply, file=replies, flush=True)
        if reply == "null" and order["stops"]:
            break
    os._exit(0)


def _function(name: str) -> Callable[..., Any]:
    spec = importlib.util.spec_from_file_location("solution", "solution.py")
    assert spec is not None and spec.loader is not None
    solution = importlib.util.module_from_spec(spec)
    imported = {module: importlib.import_module(module) for module in _MODULES}
    for module in _NAMES_OF:
        known = imported[module]
        names = getattr(known, "__all__", [var for var in vars(known) if not var.startswith("_")])
        # Keep built-in functions such as `pow`.
        vars(solution).update({name: getattr(known, name) for name in names if not hasattr(builtins, name)})
    vars(solution).update(imported)
    sys.modules["solution"] = solution
    spec.loader.exec_module(solution)
    if not hasattr(solution, name) and hasattr(solution, "Solution"):
        return getattr(solution.Solution(), name)
    return getattr(solution, name)


def _plain(value: Any) -> Any:
    """Convert numbers and arrays of numpy and similar libraries."""
    return value.tolist()


def _too_late(signum: int, frame: object) -> None:
    raise TimeoutError


if __name__ == "__main__":
    main()
