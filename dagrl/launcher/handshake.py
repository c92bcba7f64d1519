"""The data with which a machine joins a job, and Ray's token: without it, no process can join the cluster.

If the machines share a token (Ray's own variables, or its file in the home folder), each proves that it knows the token
and never sends it. Otherwise rank 0 draws one and gives it to the machines that join.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import platform
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

from pydantic import BaseModel

from dagrl.version import __version__


class Hello(BaseModel, strict=True):
    """The first message of a machine to rank 0."""

    rank: int
    nodes: int
    pipeline: str
    host: str
    address: str
    gpus: int
    cpus: int
    versions: dict[str, str] = {}
    proof: str | None = None

    @property
    def who(self) -> str:
        """The machine, for messages."""
        return f"{self.host} ({self.address})"


def versions() -> dict[str, str]:
    """Versions that must be the same on all machines."""
    return {"dagrl": __version__, "ray": metadata.version("ray"), "Python": platform.python_version()}


def version_difference(theirs: Mapping[str, str], ours: Mapping[str, str]) -> str:
    """The first version that differs, for messages; empty if all are the same."""
    differ = (name for name in ours if theirs.get(name) != ours[name])
    return next((f"{name} {theirs.get(name)}, and rank 0 has {ours[name]}" for name in differ), "")


def shared_token(variables: Mapping[str, str]) -> str | None:
    """The token that the user gives to all machines, if any. OSError for a file that cannot be read."""
    if token := variables.get("RAY_AUTH_TOKEN", "").strip():
        return token
    if path := variables.get("RAY_AUTH_TOKEN_PATH", "").strip():
        return Path(path).read_text().strip() or None
    default = Path.home() / ".ray" / "auth_token"
    return (default.read_text().strip() or None) if default.is_file() else None


def prove(token: str, challenge: str) -> str:
    """An HMAC of the challenge, which shows knowledge of the token."""
    return hmac.new(token.encode(), challenge.encode(), hashlib.sha256).hexdigest()


def is_proof(answer: str | None, token: str, challenge: str) -> bool:
    """Whether `answer` proves knowledge of the token."""
    # compare_digest raises TypeError for other characters.
    return answer is not None and answer.isascii() and hmac.compare_digest(answer, prove(token, challenge))


def write_token(token: str, folder: Path) -> Path:
    """Write the token to a file that only processes of this user can read."""
    path = folder / "token"
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(token)
    return path
