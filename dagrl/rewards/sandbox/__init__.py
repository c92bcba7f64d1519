"""Runs untrusted code in a process without network, child processes or access to other files."""

from dagrl.rewards.sandbox.runner import Outcome, Result, run, run_bash

__all__ = ["Outcome", "Result", "run", "run_bash"]
