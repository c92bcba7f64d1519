"""The part of a server that one worker starts: all of it, or the processes on one machine."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from dagrl.backends.backend import RankContext
from dagrl.config.schema.engine import SentAdapter


@dataclass(frozen=True, slots=True)
class ServerShare:
    """A server's processes on one machine."""

    name: str
    """``engine/server``, for messages and log names."""
    server: int
    node: int
    """Index among the server's machines; the first one serves requests."""
    nodes: int
    gpus: tuple[str, ...]
    """GPUs of the server's slots on this machine, as in CUDA_VISIBLE_DEVICES; none on a CPU."""
    ranks: RankContext
    """The server's processes meet at its address, on the first machine."""
    logs: Path
    start_timeout_s: float
    sleeps: bool
    adapter: SentAdapter | None = None
    """The server has the model's weights, and receives such adapters in place of weights."""
    scored_top_k: int | None = None
    """Most candidates per token in requests for log-probs of given tokens; None without such requests."""

    @property
    def log_prefix(self) -> Path:
        return self.logs / f"{self.name.replace('/', '-')}{f'-node{self.node}' if self.nodes > 1 else ''}"

    @property
    def seed(self) -> int:
        """A different seed per server, in 31 bits."""
        return int.from_bytes(hashlib.sha256(f"{self.ranks.seed}/{self.server}".encode()).digest()[:4]) >> 1
