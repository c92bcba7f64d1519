"""The `math` reward: 1 if the response's final answer equals the reference mathematically, by math-verify.

Comparisons run in helper processes (`dagrl.rewards.math_checker`) that limit their CPU time, one caller at a time.
"""

from __future__ import annotations

import json
import select
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from pydantic import PositiveFloat

from dagrl.rewards.math_checker import READY

_SILENCE_S = 600.0
"""Longest wait for a helper's reply, far above its limit of CPU time, because the machine may be busy."""


def math_reward(
    response: str, answer: str, finish_reason: str = "stop", *, strict: bool = False, timeout_s: PositiveFloat = 2.0
) -> float:
    r"""1.0 if the final answer of `response` equals `answer`, else 0.0.

    See `dagrl.rewards.final_answer.marked_part` for the final answer and `dagrl.rewards.answer_equality.matches` for
    equality. If `strict`, only a number in a box, in ``<answer>`` or after ``####`` is an answer, and none that ends a
    response whose `finish_reason` is ``length``. A comparison that takes more than `timeout_s` seconds of CPU time is
    ended and scores 0.0. If `answer` contains nothing to compare with (``\boxed{}``; if `strict`, no number), all
    responses score 0.0, with a warning. Thread-safe.
    """
    if timeout_s <= 0:
        raise ValueError(f"timeout_s of the math reward must be above 0, not {timeout_s}")
    with _CHECKERS.borrowed() as checker:
        how = {"strict": strict, "cut": finish_reason == "length", "cpu_seconds": timeout_s}
        reply = checker.ask({"response": response, "answer": answer, **how})
    if "error" in reply:
        warnings.warn(f"{reply['error']}: its responses get a reward of 0", stacklevel=2)
        return 0.0
    return float(reply["matches"])


class _Checker:
    """A helper process."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "dagrl.rewards.math_checker"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdin is not None and self._process.stdout is not None
        self._requests, self._replies, self.pid = self._process.stdin, self._process.stdout, self._process.pid
        if self._line("to start").strip() != READY:
            self.close()
            raise RuntimeError(f"{' '.join(command)} did not start; its error output says why")

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """The helper's reply. Raises RuntimeError if the process died."""
        print(json.dumps(request), file=self._requests, flush=True)
        reply = self._line("to compare two answers")
        if reply:
            return json.loads(reply)
        raise RuntimeError(f"the process that compares formulas died with status {self._process.wait()}")

    def _line(self, what: str) -> str:
        """The helper's next line; empty if it has ended. Raises RuntimeError on timeout."""
        # One line per reply, so our buffer is empty.
        if not select.select([self._replies], [], [], _SILENCE_S)[0]:
            self.close()
            raise RuntimeError(f"waited {_SILENCE_S:.0f} s for the process that compares formulas {what}")
        return self._replies.readline()

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def close(self) -> None:
        """End the process and close its pipes."""
        self._process.kill()
        self._process.wait()
        self._requests.close()
        self._replies.close()


class _Checkers:
    """A pool of helper processes that grows on demand."""

    def __init__(self) -> None:
        self._idle: list[_Checker] = []

    @contextmanager
    def borrowed(self) -> Iterator[_Checker]:
        """Context with exclusive use of a process."""
        checker = self._take_idle() or _Checker()
        try:
            yield checker
        except BaseException:
            # Its pipes may hold an unread reply, which the next caller would take for its own.
            checker.close()
            raise
        self._idle.append(checker)

    def _take_idle(self) -> _Checker | None:
        # Another thread may take the last one.
        with suppress(IndexError):
            while True:
                checker = self._idle.pop()
                if checker.alive:
                    return checker
                checker.close()
        return None


_CHECKERS = _Checkers()
