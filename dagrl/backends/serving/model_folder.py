"""The Hugging Face folder that a server loads: the model's own, or a temporary one."""

from __future__ import annotations

import json
from pathlib import Path

from dagrl.backends.runtime.initial_weights import published_shapes, weight_source
from dagrl.config.fp8_weights import Fp8Weights
from dagrl.config.schema import ModelSpec
from dagrl.model_files.hf_folder import copy_tokenizer, write_config, write_hf_folder
from dagrl.model_files.images import image_settings
from dagrl.model_files.library_model import architecture, load_hf_config

_CONFIG = "config.json"
_WEIGHT_FILES = (".safetensors", ".index.json", ".bin", ".pt", ".pth")


def model_folder(
    model: ModelSpec, scratch: Path, *, seed: int, with_weights: bool, fp8: Fp8Weights | None = None
) -> Path:
    """``model.path``, or `scratch` with the config of ``model.init``, and its random initial weights if requested.

    With `fp8`, `scratch` has a config for weights in that format, and no weights. Raises ValueError for an
    invalid model, OSError if `scratch` cannot be written.
    """
    assert fp8 is None or not with_weights, "weights in fp8 come from a trainer"
    if model.path is not None:
        folder = model.path.expanduser()
        return folder if fp8 is None else _quantised_folder(folder, scratch, model, fp8)
    config = load_hf_config(model)
    name_of_class = architecture(config)
    if with_weights:
        source = weight_source(model, seed)
        write_hf_folder(scratch, config, name_of_class, ((name, source.get(name)) for name in source.names()))
    else:
        config.architectures = [name_of_class]
        write_config(scratch, config)
        if fp8 is not None:
            _quantise_config(scratch / _CONFIG, model, fp8)
    if image_settings(model) is not None:
        # The server's processor of images needs both.
        copy_tokenizer(model, scratch)
    return scratch


def _quantised_folder(folder: Path, scratch: Path, model: ModelSpec, fp8: Fp8Weights) -> Path:
    """`scratch` with the files of `folder` except its weights."""
    for path in folder.iterdir():
        if path.name != _CONFIG and not path.name.endswith(_WEIGHT_FILES):
            (scratch / path.name).symlink_to(path.resolve())
    (scratch / _CONFIG).write_bytes((folder / _CONFIG).read_bytes())
    _quantise_config(scratch / _CONFIG, model, fp8)
    return scratch


def _quantise_config(path: Path, model: ModelSpec, fp8: Fp8Weights) -> None:
    shapes = published_shapes(load_hf_config(model))
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"quantization_config": fp8.quantization_config(shapes.items())}, indent=1))
