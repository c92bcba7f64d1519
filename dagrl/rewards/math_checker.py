"""The process behind the `math` reward: ``python -m dagrl.rewards.math_checker`` answers one JSON line with another.

Comparing formulas can take for ever (``9^{9^{9^9}}``), and neither a signal handler nor a thread can stop Python inside
one long operation on integers. Here the kernel does: before each comparison the process arms a timer on its own CPU
time whose signal, left unhandled, ends it. So the bound holds; it needs no main thread in the caller, does not depend
on how busy the machine is, and leaves nothing running when the caller dies.
"""

from __future__ import annotations

import json
import logging
import re
import resource
import signal
import sys
from collections.abc import Iterator
from typing import Any

from dagrl.rewards.final_answer import BOXED, GSM8K_MARK, marked_part

READY = "ready"
MEMORY_BYTES = 4 << 30


def matches(response: str, answer: str) -> bool:
    r"""Whether the final answer of `response` equals the reference `answer`. ValueError for a reference without one.

    The final answer is what is in the last ``\boxed{}``; without one, what follows GSM8K's ``####``; without either,
    the last formula or number, as math-verify finds it. The reference may also be a worked solution in GSM8K's form.
    """
    from math_verify import verify

    reference = next(filter(None, map(_parse, _formulas(answer))), None)
    if not reference:
        raise ValueError(f"the reference answer {answer[:80]!r} holds nothing to compare with")
    return bool(verify(reference, _parse(marked_part(response) or response), timeout_seconds=None))


def _parse(text: str) -> list[Any]:
    from math_verify import parse

    return parse(text, parsing_timeout=None)


def _formulas(answer: str) -> Iterator[str]:
    """A reference as formulas, the first of which that can be read is meant.

    A bare one is meant whole, and math-verify would look for the last number in it; so is one whose dollars are a
    price's.
    """
    answer = answer.rpartition(GSM8K_MARK)[2].strip()
    if re.search(r"\\boxed|\$.*\$|\\\(|\\\[", answer):
        yield answer
    if answer:
        yield f"{BOXED}{answer}}}"


def _answer_to(request: dict[str, Any]) -> dict[str, Any]:
    try:
        return {"matches": matches(request["response"], request["answer"])}
    except ValueError as error:
        return {"error": str(error)}


def main() -> None:
    """Serve requests until standard input ends."""
    import math_verify  # noqa: F401 - loaded before the first clock runs

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
    print(READY, file=replies, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, request["cpu_seconds"])
        reply = _answer_to(request)
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(reply), file=replies, flush=True)


if __name__ == "__main__":
    main()
