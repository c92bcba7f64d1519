"""The part of a server that one worker starts: all of it, or the processes on one machine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class ServerShare:
    """A server's processes on one machine."""

    name: str
    """``engine/server``, for messages and log names."""
    server: int
    """Number of the server in its engine."""
    node: int
    """Index among the server's machines; the first one serves requests."""
    nodes: int
    gpus: tuple[str, ...]
    """GPUs of the server's slots on this machine, as in CUDA_VISIBLE_DEVICES; none on a CPU."""
    address: str
    """Rendezvous address of the server's processes, on its first machine."""
    port: int
    logs: Path
    """Folder for logs."""
    start_timeout_s: float

    @property
    def log_prefix(self) -> Path:
        """Prefix of its log files."""
        return self.logs / f"{self.name.replace('/', '-')}{f'-node{self.node}' if self.nodes > 1 else ''}"
