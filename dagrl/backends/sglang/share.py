"""What one worker starts of a server: all of it, or the processes on one of its machines."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class ServerShare:
    """A server's processes on one machine."""

    name: str
    """``engine/server``, for messages and names of logs."""
    server: int
    """Which of the engine's servers it is."""
    node: int
    """Which of the server's machines it is; the first speaks for the server."""
    nodes: int
    gpus: tuple[str, ...]
    """GPUs of the server's slots on this machine, as CUDA_VISIBLE_DEVICES names them; none on a CPU."""
    address: str
    """Where the server's processes meet, on its first machine."""
    port: int
    logs: Path
    """Folder for what the processes print."""
    start_timeout_s: float

    @property
    def log_prefix(self) -> Path:
        """How the names of its logs begin."""
        return self.logs / f"{self.name.replace('/', '-')}{f'-node{self.node}' if self.nodes > 1 else ''}"
