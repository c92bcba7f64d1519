"""Running code that nobody has read: a process without network, children, other people's files or much of anything."""

from dagrl.rewards.sandbox.runner import Outcome, Result, run

__all__ = ["Outcome", "Result", "run"]
