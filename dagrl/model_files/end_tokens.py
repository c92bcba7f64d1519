"""Tokens that end generation, in addition to those named in a pipeline."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from dagrl.config.schema import ModelSpec

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_CONFIGS = ("config.json", "generation_config.json")


def end_tokens(model: ModelSpec, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """The tokenizer's end of sequence, and the ones in the model's config and generation config; all backends use
    these.

    Chat models often have several; the tokenizer has one.
    """
    named = _named([model.init or {}] if model.path is None else _configs(model.path.expanduser()))
    return frozenset(token for token in (tokenizer.eos_token_id, *named) if isinstance(token, int))


def _configs(folder: Path) -> Iterator[object]:
    for name in _CONFIGS:
        try:
            yield json.loads((folder / name).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue  # optional; loading the model reports a broken file


def _named(configs: Iterable[object]) -> Iterator[object]:
    for config in configs:
        named = config.get("eos_token_id") if isinstance(config, Mapping) else None
        yield from named if isinstance(named, list) else [named]
