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

from dagrl.rewards.final_answer import BOXED, GSM8K_MARK, last_boxed, marked_part
from dagrl.rewards.in_latex import in_latex, of_hundred

READY = "ready"
MEMORY_BYTES = 4 << 30
LONGEST_ANSWER = 1000
"""Characters of a marked answer, unless the reference is as long: what is longer has been repeated rather than found,
and takes sympy all the time that it is given."""


def matches(response: str, answer: str) -> bool:
    r"""Whether the final answer of `response` equals the reference `answer`. ValueError for a reference without one.

    The final answer is what is marked as such (`marked_part`), up to `LONGEST_ANSWER` characters; where nothing is, the
    last formula or number, as math-verify finds it. The reference may also be a worked solution in GSM8K's form. Where
    one of the two is a percentage, the other may be the same number without the sign, or a hundredth of it: data sets
    have it both ways.
    """
    from math_verify import verify

    reference = in_latex(_unwrapped(answer.rpartition(GSM8K_MARK)[2].strip()))
    marked = marked_part(response)
    if marked is not None and len(marked) > max(LONGEST_ANSWER, 4 * len(reference)):
        return False
    said = response if marked is None else in_latex(_unwrapped(marked))
    for expected, found in _with_percentages(reference, said, whole=marked is not None):
        expressions = next(filter(None, map(_parse, _formulas(expected))), None)
        if not expressions:
            raise ValueError(f"the reference answer {answer[:80]!r} holds nothing to compare with")
        # What has not been marked by a box, math-verify looks through for a number.
        as_found = found in (marked, response)
        if verify(expressions, _parse(found if as_found else f"{BOXED}{found}}}"), timeout_seconds=None):
            return True
    return False


def _with_percentages(reference: str, said: str, *, whole: bool) -> Iterator[tuple[str, str]]:
    """What is to be compared: reference and answer, without the sign of percent where both have it, or either way.

    `whole`: what is said is the answer alone.
    """
    ours, theirs = of_hundred(reference), of_hundred(said) if whole else None
    yield ours or reference, theirs or said
    if ours and not theirs:
        yield _hundredth(ours), said
    elif theirs and not ours:
        yield reference, _hundredth(theirs)


def _hundredth(number: str) -> str:
    return rf"\frac{{{number}}}{{100}}"


def _unwrapped(text: str) -> str:
    r"""What is in ``\boxed{...}`` or ``$...$``, where the text is no more than that."""
    if text.startswith(BOXED) and last_boxed(text) == text:
        text = text.removeprefix(BOXED).removesuffix("}").strip()
    found = re.fullmatch(r"\$([^$]+)(?<!\\)\$", text)
    return found[1].strip() if found else text


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
