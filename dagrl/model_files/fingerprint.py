"""Fingerprints of models and tokenizers, equal for all copies of a folder."""

from __future__ import annotations

import hashlib
import json

from dagrl.config.schema import ModelSpec, TokenizerSpec
from dagrl.model_files.hf_config import read_config

_OF_THE_COPY = ("_name_or_path", "transformers_version", "torch_dtype", "dtype", "architectures", "use_cache")
"""Fields of config.json that do not describe the model."""
_VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt", "tiktoken.model", "tekken.json")


def fingerprints(model: ModelSpec) -> dict[str, str]:
    """Return hashes of config and tokenizer, which stored samples and a run must share. Weights may differ."""
    return {"model": model_fingerprint(model), "tokenizer": tokenizer_fingerprint(model)}


def model_fingerprint(model: ModelSpec) -> str:
    """The fingerprint of a model's config: weights may differ. ValueError or OSError if it cannot be read."""
    fields = {name: value for name, value in read_config(model).items() if name not in _OF_THE_COPY}
    return _digest(json.dumps(fields, sort_keys=True, default=str).encode())


def tokenizer_fingerprint(model: ModelSpec) -> str:
    """The fingerprint of a tokenizer's vocabulary. OSError if it cannot be read."""
    if isinstance(model.tokenizer, TokenizerSpec):
        return _digest(model.tokenizer.model_dump_json().encode())
    folder = model.tokenizer or model.path
    assert folder is not None, "a model without a tokenizer"
    files = [folder.expanduser() / name for name in _VOCABULARIES]
    return _digest(*(file.read_bytes() for file in files if file.is_file()))


def _digest(*texts: bytes) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for text in texts:
        digest.update(len(text).to_bytes(8))
        digest.update(text)
    return digest.hexdigest()
