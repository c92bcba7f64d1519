"""The process behind the `math` reward: ``python -m dagrl.rewards.math_checker`` answers one JSON line with another.

Comparing formulas can take for ever (``9^{9^{9^9}}``), and neither a signal handler nor a thread can stop Python inside
one long operation on integers. Here the kernel does: before each comparison the process arms a timer on its own CPU
time whose signal, left unhandled, ends it. So the bound holds; it needs no main thread in the caller, does not depend
on how busy the machine is, and leaves nothing running when the caller dies.

The process that is started loads sympy and forks a child, which answers the requests. When the timer ends the child,
the parent writes the reply that is due and forks the next child: milliseconds, where a new process takes seconds.
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
_TYPICAL = (r"\frac{x+1}{2}", r"2\sqrt{3}", r"(-\infty,2]\cup[3,5)", "x=2y", r"\begin{pmatrix}1\\a\end{pmatrix}")


def main() -> None:
    """Serve requests until standard input ends."""
    # Ctrl-C goes to the whole process group; the caller decides when this one ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    limit = MEMORY_BYTES if hard == resource.RLIM_INFINITY else min(MEMORY_BYTES, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    # math-verify warns that its own timeouts are off, which is the point.
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    # Whatever a library prints must not get between the replies.
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
            # The caller is told what ended the child: this process ends of the same.
            os.kill(os.getpid(), -code)
        else:
            sys.exit(code)


def _load() -> None:
    """Import what comparisons need and let its grammar learn from typical ones, once for all children."""
    for formula in _TYPICAL:
        matches(rf"\boxed{{{formula}}}", f"{formula}+1")
    # Children share the pages of this process as long as no collection touches them.
    gc.collect()
    gc.freeze()


def _serve(replies: IO[str]) -> None:
    """Answer requests until standard input ends."""
    for line in sys.stdin:
        request = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, request["cpu_seconds"])
        reply = _reply_to(request)
        signal.setitimer(signal.ITIMER_PROF, 0)
        _write(replies, json.dumps(reply))


def _reply_to(request: dict[str, Any]) -> dict[str, Any]:
    try:
        return {"matches": matches(request["response"], request["answer"])}
    except ValueError as error:
        return {"error": str(error)}
    except (RecursionError, MemoryError):
        # Brackets nested a thousand deep are no answer.
        return {"matches": False}


def _write(replies: IO[str], line: str) -> None:
    print(line, file=replies, flush=True)


if __name__ == "__main__":
    main()
