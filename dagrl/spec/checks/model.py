"""The model: one source of weights, a whole folder, a tokenizer that makes sense, and sizes that fit each other.

Only small text files are read, and no weights: `dagrl.engines` loads the model.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dagrl.spec.checks.model_sizes import FAMILIES, SIZE_KEYS, is_size, sizes_of
from dagrl.spec.errors import Place, shown
from dagrl.spec.positions import Findings
from dagrl.spec.schema import MegatronEngineSpec, ModelSpec, Pipeline, TokenizerSpec

_MODEL: Place = ("model",)
_TOKENIZER: Place = ("model", "tokenizer")
_INDEX = "model.safetensors.index.json"
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")


def check_model(pipeline: Pipeline, findings: Findings, *, with_files: bool = True) -> Mapping[str, Any] | None:
    """Report what is wrong with the model section, the files it names, and its sizes.

    Without `with_files`, only config.json of a folder is looked at. Returns the fields of its Hugging Face config that
    are known; None where they cannot be read or are wrong.
    """
    model = pipeline.model
    if (model.path is None) == (model.init is None):
        if model.path is None:
            message = "says no model; add `path:` (a Hugging Face folder) or `init:` (random weights)"
        else:
            message = "has `path` and `init`; keep one, and set an inherited one to null"
        findings.error(_MODEL if model.path is None else ("model", "path"), message)
        config = None
    elif model.path is not None:
        try:
            config = _check_folder(model.path, model, findings, with_files=with_files)
        except OSError as error:
            message = f"{model.path} cannot be read ({error.strerror}); check the path and its permissions"
            findings.error(("model", "path"), message)
            config = None
    else:
        config = _check_init(model, findings)
    _check_tokenizer(model, findings)
    if config:
        _check_family(pipeline, config, findings)
        _check_sizes(pipeline, config, findings)
    return config


def _check_folder(folder: Path, model: ModelSpec, findings: Findings, *, with_files: bool) -> Mapping[str, Any] | None:
    """The folder's config.json, if it can be read."""
    place: Place = ("model", "path")
    if not folder.is_dir():
        what = "is a file, not a folder" if folder.exists() else "does not exist"
        remedy = "give a Hugging Face folder (`hf download NAME --local-dir DIR` makes one)"
        findings.error(place, f"{folder} {what}; {remedy}")
        return None
    if with_files:
        _check_weights(folder, findings)
        if model.tokenizer is None and not any((folder / name).is_file() for name in _TOKENIZER_FILES):
            files = ", ".join(_TOKENIZER_FILES[:2])
            findings.error(place, f"{folder} has no tokenizer ({files}); copy it there, or add `tokenizer:`")
    config_path = folder / "config.json"
    if not config_path.is_file():
        findings.error(place, f"{folder} has no config.json; give the folder that holds the model's Hugging Face files")
        return None
    config = _json_mapping(config_path)
    if config is None:
        findings.error(place, f"{config_path} is not a JSON object; copy the file again")
    return config


def _check_weights(folder: Path, findings: Findings) -> None:
    place: Place = ("model", "path")
    index_path = folder / _INDEX
    if not index_path.is_file():
        if not (folder / "model.safetensors").is_file():
            old = " (only PyTorch's .bin files)" if any(folder.glob("*.bin")) else ""
            findings.error(place, f"{folder} has no safetensors weights{old}; save the model as safetensors")
        elif (folder / "model.safetensors").stat().st_size == 0:
            findings.error(place, f"{folder / 'model.safetensors'} is empty; copy the file again")
        return
    index = _json_mapping(index_path)
    files = index.get("weight_map") if index else None
    if not isinstance(files, dict):
        findings.error(place, f"{index_path} does not say which file holds which weight; copy the file again")
        return
    lost = sorted(name for name in set(files.values()) if not (folder / str(name)).is_file())
    if lost:
        message = f"{folder} lacks {len(lost)} of its weight files, {lost[0]} among them; copy them again"
        findings.error(place, message)


def _json_mapping(path: Path) -> dict[str, Any] | None:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def _check_init(model: ModelSpec, findings: Findings) -> Mapping[str, Any] | None:
    assert model.init is not None
    if not isinstance(model.init.get("model_type"), str):
        message = "does not say which architecture; add `model_type:`, such as qwen3"
        findings.error(("model", "init", "model_type"), message)
    if model.tokenizer is None:
        message = (
            "random weights bring no tokenizer; add `tokenizer:` (a folder, or `{kind: characters, alphabet: ...}`)"
        )
        findings.error(_MODEL, message, depends_on=[_TOKENIZER])
    wrong = [name for name in SIZE_KEYS if model.init.get(name) is not None and not is_size(model.init[name])]
    for name in wrong:
        message = f"expected a whole number above 0, got {shown(model.init[name])}; write digits without quotes"
        findings.error(("model", "init", name), message)
    _check_vocabulary(model, findings)
    return None if wrong else model.init


def _check_vocabulary(model: ModelSpec, findings: Findings) -> None:
    assert model.init is not None
    vocabulary = model.init.get("vocab_size")
    if not isinstance(model.tokenizer, TokenizerSpec) or not is_size(vocabulary):
        return
    needed = 256 if model.tokenizer.kind == "bytes" else len(model.tokenizer.alphabet)
    if vocabulary <= needed:
        message = (
            f"{vocabulary} rows cannot hold the tokenizer's {needed} {model.tokenizer.kind} and its special tokens; "
            "take vocab_size out, and it is the tokenizer's"
        )
        findings.error(("model", "init", "vocab_size"), message, depends_on=[_TOKENIZER])


def _check_tokenizer(model: ModelSpec, findings: Findings) -> None:
    tokenizer = model.tokenizer
    if isinstance(tokenizer, Path):
        if not os.access(tokenizer, os.R_OK | os.X_OK) or not tokenizer.is_dir():
            findings.error(
                _TOKENIZER, f"{tokenizer} is not a folder that can be read; give one with a Hugging Face tokenizer"
            )
        elif not any((tokenizer / name).is_file() for name in _TOKENIZER_FILES):
            findings.error(_TOKENIZER, f"{tokenizer} has no tokenizer.json or the like; give a tokenizer's folder")
    elif tokenizer is not None and tokenizer.kind == "bytes":
        if tokenizer.alphabet:
            findings.error((*_TOKENIZER, "alphabet"), "a tokenizer of bytes has no alphabet; take it out")
    elif tokenizer is not None:
        if not tokenizer.alphabet:
            message = "a tokenizer of characters needs to know which; add `alphabet:` with all of them"
            findings.error((*_TOKENIZER, "alphabet"), message)
        doubled = [character for character, count in Counter(tokenizer.alphabet).items() if count > 1]
        if doubled:
            shown = ", ".join(map(repr, doubled))
            findings.error((*_TOKENIZER, "alphabet"), f"holds {shown} more than once; write each character once")


def _check_family(pipeline: Pipeline, config: Mapping[str, Any], findings: Findings) -> None:
    family = config.get("model_type")
    native = [
        name
        for name, engine in pipeline.engines.items()
        if isinstance(engine, MegatronEngineSpec) and engine.bridge == "native"
    ]
    if native and isinstance(family, str) and family not in FAMILIES:
        place: Place = ("model", "init", "model_type") if pipeline.model.init else ("model", "path")
        message = f"the megatron engine has no model type {family!r}; choose from: {', '.join(FAMILIES)}"
        findings.error(place, message, depends_on=[("engines", name, "bridge") for name in native])


def _check_sizes(pipeline: Pipeline, config: Mapping[str, Any], findings: Findings) -> None:
    heads, hidden = config.get("num_attention_heads"), config.get("hidden_size")
    groups = config.get("num_key_value_heads")
    section: Place = ("model", "init") if pipeline.model.init else ("model", "path")
    chosen, experts = config.get("num_experts_per_tok"), sizes_of(config).experts
    if is_size(chosen) and experts and chosen > experts.value:
        message = f"num_experts_per_tok {chosen} is more than {experts.name} {experts.value}; lower it"
        findings.error(section, message)
    for name in ("head_dim", "qk_rope_head_dim"):
        if is_size(config.get(name)) and config[name] % 2:
            message = f"{name} {config[name]} is odd, and positions are said by turning pairs; choose an even size"
            findings.error(section, message)
    if "kv_lora_rank" in config:
        return  # Latent attention has heads of sizes of their own.
    if is_size(heads) and is_size(hidden) and "head_dim" not in config and hidden % heads:
        message = f"num_attention_heads {heads} does not divide hidden_size {hidden}; choose a divisor, or add head_dim"
        findings.error(section, message)
    if is_size(heads) and is_size(groups) and heads % groups:
        message = f"num_key_value_heads {groups} does not divide num_attention_heads {heads}; choose a divisor"
        findings.error(section, message)
