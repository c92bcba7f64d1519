"""Runs code that has not been reviewed: a process without network, children, foreign files or much of anything."""

from dagrl.rewards.sandbox.runner import Outcome, Result, run

__all__ = ["Outcome", "Result", "run"]
