"""Read Hugging Face folders as plain JSON, without the libraries that models are built with."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dagrl.config.schema import ModelSpec, TokenizerSpec

type HfConfig = Mapping[str, Any]
"""Fields of a model's config.json, whose types differ by model."""

PAD, EOS, UNKNOWN, IMAGE = "<pad>", "<eos>", "<unk>", "<|image_pad|>"
"""Special tokens of generated tokenizers: byte tokenizers need no unknown token, and only vision models have a token
for images."""
_LFS = b"version https://git-lfs"


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file. ValueError without one; OSError if it cannot be read."""
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError):  # RecursionError: brackets that are left open
        content = None
    if not isinstance(content, dict):
        raise ValueError(f"{path} is not a JSON object; copy the file again{lfs_hint(path)}")
    return content


def lfs_hint(path: Path) -> str:
    """Return the reason if a file holds a line of text in place of its content."""
    with path.open("rb") as file:
        is_pointer = file.read(len(_LFS)) == _LFS
    return " (it is a pointer of git-lfs, which was not installed when it was cloned)" if is_pointer else ""


def folder_config(folder: Path) -> dict[str, Any]:
    """Return the config.json of a Hugging Face folder. ValueError if it is invalid; OSError like `read_json`."""
    if not folder.is_dir():
        what = "is a file, not a folder" if folder.exists() else "does not exist"
        raise ValueError(f"{folder} {what}; give a Hugging Face folder (`hf download NAME --local-dir DIR` makes one)")
    path = folder / "config.json"
    if not path.is_file():
        raise ValueError(f"{folder} has no config.json; give the folder that holds the model's Hugging Face files")
    config = read_json(path)
    if not isinstance(config.get("model_type"), str):
        raise ValueError(f"{path} names no architecture (model_type); give the folder of a Hugging Face model")
    return config


def read_config(model: ModelSpec) -> HfConfig:
    """Return the fields of config.json, or of ``init`` with the vocabulary's size from the tokenizer.

    ValueError if a file cannot be read.
    """
    if model.path is not None:
        return flat_config(_readable(model.path.expanduser() / "config.json"))
    if model.init is None:
        raise ValueError("model: give either path (a Hugging Face folder) or init (model_type and its fields)")
    init = flat_config(model.init)
    ids = token_ids(model.tokenizer) if init.get("vocab_size") is None or "vision_config" in init else {}
    given = {"vocab_size": len(ids)} | ({"image_token_id": ids[IMAGE]} if IMAGE in ids else {})
    return {**given, **{name: value for name, value in init.items() if value is not None or name not in given}}


def flat_config(config: HfConfig) -> HfConfig:
    """Return a config with the fields of its ``text_config`` beside its own, as older files have them."""
    text = config.get("text_config")
    return {**text, **config} if isinstance(text, Mapping) else config


def token_ids(tokenizer: Path | TokenizerSpec | None) -> Mapping[str, int]:
    """Map tokens to their ids in tokenizer.json. ValueError if it is missing or cannot be read."""
    if isinstance(tokenizer, TokenizerSpec):
        # "<0x..>" is the tokenizers library's name of a byte.
        of_bytes = [*(f"<0x{byte:02X}>" for byte in range(256)), PAD, EOS]
        tokens = of_bytes if tokenizer.kind != "characters" else [PAD, EOS, UNKNOWN, *tokenizer.alphabet]
        tokens = [*tokens, IMAGE] if tokenizer.images else tokens
        return {token: number for number, token in enumerate(tokens)}
    if tokenizer is None:
        raise ValueError("model: random weights bring no tokenizer; add `tokenizer:`, or vocab_size to `init:`")
    file = tokenizer.expanduser() / "tokenizer.json"
    try:
        ids = _listed_ids(_readable(file))
    except (AttributeError, IndexError, KeyError, TypeError) as error:
        raise ValueError(f"{file} is no tokenizer of Hugging Face's; copy the file again") from error
    if not ids:
        raise ValueError(f"{file} does not list its tokens; add vocab_size to model.init")
    return ids


def _listed_ids(content: HfConfig) -> dict[str, int]:
    """Map tokens to their ids, if the file lists its vocabulary."""
    vocabulary = (content.get("model") or {}).get("vocab")
    if not vocabulary:
        return {}
    # Unigram tokenizers list pairs of a token and its score.
    known = (
        vocabulary.items() if isinstance(vocabulary, dict) else ((pair[0], at) for at, pair in enumerate(vocabulary))
    )
    return dict(known) | {added["content"]: added["id"] for added in content.get("added_tokens") or ()}


def _readable(path: Path) -> dict[str, Any]:
    try:
        return read_json(path)
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error}; give a whole Hugging Face folder") from error
