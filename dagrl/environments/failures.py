"""Failures of environments and sandboxes, by class: they are data of a run, not rewards of a policy."""

from __future__ import annotations

from typing import Literal, get_args

FailureClass = Literal["start", "exec", "timeout", "network", "grader", "program"]
"""``start``: a sandbox or environment did not start. ``exec``: it could not run what it was given. ``timeout``: a limit
of time was reached. ``network``: a service did not answer, or not as it should. ``grader``: the episode has no score.
``program``: anything else that the program raised."""
FAILURE_CLASSES: tuple[FailureClass, ...] = get_args(FailureClass)
LOST = tuple(each for each in FAILURE_CLASSES if each != "program")
"""Classes that say nothing of the policy; the ``finish_reason`` of a sample that such a failure ended."""


class EnvironmentFailedError(RuntimeError):
    """An environment or sandbox failed, not the policy."""

    def __init__(self, failure: FailureClass, message: str) -> None:
        """`message` says what failed and why, in one line."""
        super().__init__(message)
        self.failure = failure
