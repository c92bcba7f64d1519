"""Small JSON files of a model's folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def json_object(path: Path) -> dict[str, Any] | None:
    """The content of a file; None where it is not a JSON object. OSError where it cannot be read."""
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError):  # RecursionError: brackets that are left open
        return None
    return content if isinstance(content, dict) else None
