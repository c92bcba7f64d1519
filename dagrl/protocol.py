"""The version of the messages between dagrl's processes, which may run in different environments."""

from __future__ import annotations

PROTOCOL = 4
"""Raise it with each change of `dagrl.workers.messages`, `dagrl.ops.work` or the messages of a weight sync."""


def check_protocol(theirs: int) -> None:
    """Raise ValueError unless a message has this process's version."""
    if theirs != PROTOCOL:
        raise ValueError(
            f"a message has protocol version {theirs}, and this process {PROTOCOL}; "
            "install the same dagrl in the environments of all engines"
        )
