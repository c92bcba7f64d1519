"""The processes of local sandboxes."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path


def processes_of(label: str) -> list[int]:
    """Processes whose folder is in a sandbox of the label, or of one that begins with it."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if f"/{label}" in str((process / "cwd").readlink()):
                found.append(int(process.name))
    return found
