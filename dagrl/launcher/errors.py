"""The error that ends a launch."""

from __future__ import annotations


class LaunchError(Exception):
    """The reason why the machines cannot work together, in one sentence; `code` is the exit code of all of them."""

    def __init__(self, sentence: str, code: int = 1) -> None:
        super().__init__(sentence)
        self.code = code
