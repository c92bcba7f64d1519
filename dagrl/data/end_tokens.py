"""Tokens at which generation ends, beside those that a pipeline names."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from dagrl.config.schema import ModelSpec

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_CONFIGS = ("config.json", "generation_config.json")


def end_tokens(model: ModelSpec, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """The tokenizer's end of sequence, and those that the model's config and generation config name: servers heed all.

    Chat models often have several, of which the tokenizer knows one.
    """
    named = () if model.path is None else _named(model.path.expanduser())
    return frozenset(token for token in (tokenizer.eos_token_id, *named) if isinstance(token, int))


def _named(folder: Path) -> Iterator[object]:
    for name in _CONFIGS:
        try:
            config = json.loads((folder / name).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue  # a model may come without one, and whoever loads it says what is wrong with it
        told = config.get("eos_token_id") if isinstance(config, dict) else None
        yield from told if isinstance(told, list) else [told]
