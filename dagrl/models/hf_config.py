"""The fields of the pipeline's Hugging Face config as plain JSON, without the libraries that models are built with."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dagrl.config.schema import ModelSpec, TokenizerSpec

PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"
"""Special tokens of the tokenizers that are made on the spot; those of bytes know every one."""


def read_config(model: ModelSpec) -> Mapping[str, Any]:
    """The fields of ``config.json``, or those of ``init``, the vocabulary's size taken from the tokenizer where it is
    left out. ValueError where a file cannot be read.
    """
    if model.path is not None:
        return _read_object(model.path.expanduser() / "config.json")
    if model.init is None:
        raise ValueError("model: give either path (a Hugging Face folder) or init (model_type and its fields)")
    if model.init.get("vocab_size") is not None:
        return model.init
    return {**model.init, "vocab_size": len(token_ids(model.tokenizer))}


def token_ids(tokenizer: Path | TokenizerSpec | None) -> Mapping[str, int]:
    """Token -> id, as ``tokenizer.json`` lists them. ValueError where there is none, or it cannot be read."""
    if isinstance(tokenizer, TokenizerSpec):
        # "<0x..>" is the tokenizers library's own name of a byte that stands for itself.
        of_bytes = [*(f"<0x{byte:02X}>" for byte in range(256)), PAD, EOS]
        tokens = of_bytes if tokenizer.kind == "bytes" else [PAD, EOS, UNKNOWN, *tokenizer.alphabet]
        return {token: number for number, token in enumerate(tokens)}
    if tokenizer is None:
        raise ValueError("model: random weights bring no tokenizer; add `tokenizer:`, or vocab_size to `init:`")
    file = tokenizer.expanduser() / "tokenizer.json"
    try:
        ids = _listed_ids(_read_object(file))
    except (AttributeError, IndexError, KeyError, TypeError) as error:
        raise ValueError(f"{file} is no tokenizer of Hugging Face's; copy the file again") from error
    if not ids:
        raise ValueError(f"{file} does not list its tokens; add vocab_size to model.init")
    return ids


def _listed_ids(content: Mapping[str, Any]) -> dict[str, int]:
    """Token -> id, as far as the file lists its vocabulary; empty where it does not."""
    vocabulary = (content.get("model") or {}).get("vocab")
    if not vocabulary:
        return {}
    # Unigram tokenizers list pairs of a token and its score.
    known = (
        vocabulary.items() if isinstance(vocabulary, dict) else ((pair[0], at) for at, pair in enumerate(vocabulary))
    )
    return dict(known) | {added["content"]: added["id"] for added in content.get("added_tokens") or ()}


def _read_object(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"cannot read {path}: {error}; give a whole Hugging Face folder") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} is not a JSON object; copy the file again")
    return content
