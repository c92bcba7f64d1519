"""The differences between two versions of a pipeline."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from dagrl.tracking.redact import without_secrets

_LONGEST_VALUE = 40
_MOST = 8


def changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    """The keys that differ between two resolved pipelines, with both values; empty if none does."""
    old, new = dict(_values(without_secrets(before))), dict(_values(without_secrets(after)))
    told = [
        f"{key} {_shown(old, key)} -> {_shown(new, key)}"
        for key in dict.fromkeys((*old, *new))
        if key not in old or key not in new or old[key] != new[key]
    ]
    return ", ".join(told[:_MOST]) + (f" and {len(told) - _MOST} more" if len(told) > _MOST else "")


def _values(section: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Values and lists by dotted name."""
    for key, value in section.items():
        if isinstance(value, Mapping):
            yield from _values(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _shown(values: Mapping[str, Any], key: str) -> str:
    if key not in values:
        return "(default)"
    value = values[key]
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text if len(text) <= _LONGEST_VALUE else "..." + text[-_LONGEST_VALUE:]
