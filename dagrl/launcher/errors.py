"""How a launch fails."""

from __future__ import annotations


class LaunchError(Exception):
    """The machines cannot work together, in one sentence; `code` is what all of them exit with."""

    def __init__(self, sentence: str, code: int = 1) -> None:
        super().__init__(sentence)
        self.code = code


class StoppedError(LaunchError):
    """Somebody wanted the end before the run had begun."""

    def __init__(self, who: str) -> None:
        super().__init__(f"stopped from {who} before the run had begun", code=130)
