"""Runs each test on the solution, inside the sandbox, next to `solution.py` and `test_N.py`.

Reads {"key", "shows", "timeout_s", "stops"} from standard input. ``shows`` has for each test whether it sets a value,
`VALUE`, that is compared outside the sandbox; ``stops`` is whether to stop at the first test that raises. Writes ``KEY
N JSON`` for each test that does not raise. A solution that ends the process while it is imported passes no test, and
output without the key is ignored. Imports only the standard library.
"""

import json
import os
import runpy
import signal
import sys

VALUE = "_value_of_the_test"
"""The variable that holds a test's value."""


def main() -> None:
    """Run all tests, then exit without running exit handlers of the solution."""
    order = json.load(sys.stdin)
    # Discard the solution's output.
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    sys.path.insert(0, os.getcwd())  # noqa: PTH109 - pathlib takes longer to import than the rest

    import solution  # type: ignore[import-not-found] # the response, in the same folder as this file

    names = {name: value for name, value in vars(solution).items() if not name.startswith("__")}
    signal.signal(signal.SIGALRM, _too_late)
    for number, shows in enumerate(order["shows"]):
        try:
            signal.setitimer(signal.ITIMER_REAL, order["timeout_s"])
            scope = runpy.run_path(f"test_{number}.py", init_globals=names)
            reply = json.dumps(encoded(scope[VALUE]) if shows else True)
        except BaseException:  # noqa: BLE001 - the test fails on any exception
            if order["stops"]:
                break
            continue
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        print(order["key"], number, reply, file=replies, flush=True)
    os._exit(0)


def encoded(value: object) -> object:
    """Encode a value as JSON that keeps Python's built-in types distinct; see `dagrl.rewards.code.tests.decoded`.

    A subclass is encoded as its built-in type. Raises TypeError for other types.
    """
    if value is None or isinstance(value, bool):
        return value
    for scalar in (int, float, str):
        if isinstance(value, scalar):
            return scalar(value)
    if isinstance(value, complex):
        return ["complex", value.real, value.imag]
    if isinstance(value, bytes | bytearray):
        return ["bytes", bytes(value).decode("latin-1")]
    if isinstance(value, dict):
        return ["dict", *([encoded(key), encoded(value[key])] for key in value)]
    for kind in (list, tuple, set, frozenset):
        if isinstance(value, kind):
            return [kind.__name__, *map(encoded, value)]
    if hasattr(value, "tolist"):
        return encoded(value.tolist())
    raise TypeError(f"no value of Python's own types: {type(value)}")


def _too_late(signum: int, frame: object) -> None:
    raise TimeoutError


if __name__ == "__main__":
    main()
