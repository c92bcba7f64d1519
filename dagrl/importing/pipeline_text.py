"""Writes a translated pipeline as YAML, with the source of each value beside it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from dagrl.importing.settings import ImportProblem
from dagrl.importing.table import Translation

_SECTIONS = ("name", "model", "data", "groups", "engines", "nodes", "schedule", "run", "track")
_ENGINES = ("actor", "reference", "critic", "reward_model", "generator")
_NODES = ("rollout", "greedy", "reward", "baseline", "keep", "old", "ref", "values", "advantage", "held", "critic")
_FIRST = ("op", "backend", "group", "engine", "estimator", "fn", "n", "frozen_copy_of", "weights_from", "environment")
_WIDTH = 60
"""Column of the comments."""


def pipeline_text(translation: Translation, source: Path) -> str:
    """The pipeline file: each value with a comment, ``FILE:LINE key`` or the framework whose default it is."""
    lines = [
        f"# Imported from {source.name} ({translation.framework.name}) by `dagrl import`.",
        *_lines(_nested(translation.tree), (), translation, 0),
    ]
    return "\n".join(lines) + "\n"


def _nested(tree: dict[str, Any]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for key, value in tree.items():
        *parents, last = key.split(".")
        section = nested
        for parent in parents:
            section = section.setdefault(parent, {})
            if not isinstance(section, dict):
                raise ImportProblem(f"the file sets both a value and a section for the pipeline's {key}")
        section[last] = value
    return nested


def _lines(section: dict[str, Any], place: tuple[str, ...], translation: Translation, depth: int) -> Iterator[str]:
    for key in sorted(section, key=lambda name: _rank(place, name)):
        value, inner = section[key], (*place, key)
        margin = "  " * depth
        if isinstance(value, dict) and value:
            yield f"{margin}{_scalar(key)}:"
            yield from _lines(value, inner, translation, depth + 1)
        else:
            line = f"{margin}{_scalar(key)}: {_scalar(value)}"
            comment = _origin(".".join(inner), translation)
            yield f"{line:<{_WIDTH}}  # {comment}" if comment else line


def _rank(place: tuple[str, ...], name: str) -> tuple[int, int]:
    order = {(): _SECTIONS, ("engines",): _ENGINES, ("nodes",): _NODES}.get(place, _FIRST)
    return (order.index(name), 0) if name in order else (len(order), 0)


def _scalar(value: object) -> str:
    if isinstance(value, float) and "e" in repr(value):
        mantissa, _, exponent = repr(value).partition("e")
        return f"{mantissa if '.' in mantissa else f'{mantissa}.0'}e{int(exponent)}"
    text = yaml.safe_dump(value, default_flow_style=True, width=10_000, allow_unicode=True, sort_keys=False).strip()
    return text.removesuffix("\n...").removesuffix("...").strip()


def _origin(target: str, translation: Translation) -> str:
    origins = translation.origins.get(target)
    if origins is None:
        return ""
    if not origins:
        return f"default of {translation.framework.version}"
    places = dict.fromkeys(f"{Path(setting.file).name}:{setting.line} {setting.key}" for setting in origins)
    text = ", ".join(places)
    return text if len(text) < 160 else f"{next(iter(places))} and {len(places) - 1} more"
