"""The secret of a job, Ray's token: without it nobody may join the cluster or run anything there.

Where the machines have one in common (Ray's own variables, or its file in the home folder) they prove that they know
it, and it never travels. Else the leader draws one and tells it to those who come to the roll call.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from collections.abc import Mapping
from pathlib import Path

_NONCE_BYTES = 32


def shared_secret(variables: Mapping[str, str]) -> str | None:
    """The token that the user has given to all machines, where there is one. OSError where it cannot be read."""
    if token := variables.get("RAY_AUTH_TOKEN", "").strip():
        return token
    if path := variables.get("RAY_AUTH_TOKEN_PATH", "").strip():
        return Path(path).read_text().strip() or None
    default = Path.home() / ".ray" / "auth_token"
    return (default.read_text().strip() or None) if default.is_file() else None


def new_secret() -> str:
    """A token for one job."""
    return secrets.token_hex(_NONCE_BYTES)


def challenge() -> str:
    """What somebody is to prove a secret with; never the same twice."""
    return secrets.token_hex(_NONCE_BYTES)


def proof(secret: str, challenged: str) -> str:
    """Shows that one knows the secret, and does not tell it (HMAC-SHA256)."""
    return hmac.new(secret.encode(), challenged.encode(), hashlib.sha256).hexdigest()


def proves(answer: object, secret: str, challenged: str) -> bool:
    """Whether `answer` is the proof."""
    # Half a surrogate pair, which JSON can hold, could not be compared.
    return isinstance(answer, str) and answer.isascii() and hmac.compare_digest(answer, proof(secret, challenged))


def write_secret(secret: str, folder: Path) -> Path:
    """Put it where only this user's processes can read it."""
    path = folder / "token"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(secret)
    return path
