"""Finds the function of an op by name."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from dagrl.ops.base import Op


def load_op(name: str, folder: Path | None) -> Op:
    """The function of `dagrl.ops.NAME`, or the user's ``module:function`` (also searched in `folder`) as an op."""
    if ":" not in name:
        return getattr(import_module(f"dagrl.ops.{name}"), name)
    from dagrl.ops.custom import custom_op

    return custom_op(name, folder)
