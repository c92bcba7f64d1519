"""What stands for the refs of Ray's objects where there is no Ray."""

from __future__ import annotations


class Ref(str):
    """A ref that is its own name."""

    def binary(self) -> bytes:
        return self.encode()
