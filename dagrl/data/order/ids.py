"""Prompt ids: ``source index << 40 | row in the source``."""

from __future__ import annotations

_ROW_BITS = 40


def prompt_id(source: int, row: int) -> int:
    return source << _ROW_BITS | row


def source_of(prompt: int) -> int:
    return prompt >> _ROW_BITS


def row_of(prompt: int) -> int:
    return prompt & ((1 << _ROW_BITS) - 1)
