"""The Hugging Face folder that a server loads: the model's own, or a temporary one."""

from __future__ import annotations

from pathlib import Path

from dagrl.backends.hf_folder import copy_tokenizer, write_hf_folder
from dagrl.backends.model_source import architecture, load_hf_config, weight_source
from dagrl.config.schema import ModelSpec
from dagrl.models.images import image_settings


def model_folder(model: ModelSpec, scratch: Path, *, seed: int, with_weights: bool) -> Path:
    """``model.path``, or `scratch` with the config of ``model.init``, and its random initial weights if requested.

    Raises ValueError for an invalid model, OSError if `scratch` cannot be written.
    """
    if model.path is not None:
        return model.path.expanduser()
    config = load_hf_config(model)
    name_of_class = architecture(config)
    if with_weights:
        source = weight_source(model, seed)
        write_hf_folder(scratch, config, name_of_class, ((name, source.get(name)) for name in source.names()))
    else:
        config.architectures = [name_of_class]
        config.save_pretrained(scratch)
    if image_settings(model) is not None:
        # The server's processor of images needs both.
        copy_tokenizer(model, scratch)
    return scratch
