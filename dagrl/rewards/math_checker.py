"""The process behind the `math` reward: ``python -m dagrl.rewards.math_checker`` answers JSON lines.

Comparing formulas may never end (``9^{9^{9^9}}``), and neither a signal handler nor a thread can interrupt Python
within one long integer operation. So before each comparison the process arms a timer on its own CPU time; its unhandled
signal ends the process. This works in any thread of the caller, does not depend on the machine's load, and leaves
nothing running when the caller dies.

The started process loads sympy and forks a child, which answers the requests. If the timer ends the child, the parent
writes the missing reply and forks another child, which takes milliseconds instead of seconds.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import resource
import signal
import sys
from typing import IO, Any

from dagrl.rewards.answer_equality import matches

READY = "ready"
MEMORY_BYTES = 4 << 30
_TYPICAL = (
    (r"\frac{x+1}{2}", r"\frac{x+1}{2}+1"),
    (r"2\sqrt{3}", r"\sqrt{12}"),
    ("9+9", "18"),
    ("n!", "n(n-1)!"),
    (r"(-\infty,2]\cup[3,5)", r"(-\infty,2]\cup[3,4)"),
    ("2x>6", "x>3"),
    ("x=2y", "2x-4y=0"),
    ("x=2y", "x=3y"),
    (r"\begin{pmatrix}1\\a\end{pmatrix}", r"\begin{pmatrix}1\\2a\end{pmatrix}"),
)
"""Pairs of formulas, each of which needs another part of sympy."""


def main() -> None:
    """Serve requests until standard input ends."""
    # Ctrl-C goes to the whole process group; the caller ends this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    limit = MEMORY_BYTES if hard == resource.RLIM_INFINITY else min(MEMORY_BYTES, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    # math-verify warns that its own timeouts are off, which is intended.
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    # Libraries must not print between the replies.
    replies, sys.stdout = sys.stdout, sys.stderr
    _load()
    _write(replies, READY)
    while True:
        child = os.fork()
        if child == 0:
            return _serve(replies)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if code == -signal.SIGPROF:
            _write(replies, json.dumps({"matches": False}))
        elif code < 0:
            # End with the child's signal, so that the caller sees it.
            os.kill(os.getpid(), -code)
        else:
            sys.exit(code)


def _load() -> None:
    """Import dependencies and compare typical formulas, once for all children."""
    for said, answer in _TYPICAL:
        matches(rf"\boxed{{{said}}}", answer)
    # Children share this process's pages until a garbage collection writes to them.
    gc.collect()
    gc.freeze()


def _serve(replies: IO[str]) -> None:
    for line in sys.stdin:
        request = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, request["cpu_seconds"])
        reply = _reply_to(request)
        signal.setitimer(signal.ITIMER_PROF, 0)
        _write(replies, json.dumps(reply))


def _reply_to(request: dict[str, Any]) -> dict[str, Any]:
    try:
        strict, cut = request.get("strict", False), request.get("cut", False)
        return {"matches": matches(request["response"], request["answer"], strict=strict, cut=cut)}
    except ValueError as error:
        return {"error": str(error)}
    except (RecursionError, MemoryError):
        # Brackets nested a thousand deep are not an answer.
        return {"matches": False}


def _write(replies: IO[str], line: str) -> None:
    print(line, file=replies, flush=True)


if __name__ == "__main__":
    main()
