"""The Hugging Face folder that a server loads: the model's own, or a temporary one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from dagrl.backends.hf_folder import write_hf_folder
from dagrl.backends.model_source import load_hf_config, weight_source
from dagrl.config.schema import ModelSpec

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def model_folder(model: ModelSpec, scratch: Path, *, seed: int, with_weights: bool) -> Path:
    """``model.path``, or `scratch` with the config of ``model.init``, and its random initial weights if requested.

    Raises ValueError for an invalid model, OSError if `scratch` cannot be written.
    """
    if model.path is not None:
        return model.path.expanduser()
    config = load_hf_config(model)
    architecture = _architecture(config)
    if with_weights:
        source = weight_source(model, seed)
        write_hf_folder(scratch, config, architecture, ((name, source.get(name)) for name in source.names()))
    else:
        config.architectures = [architecture]
        config.save_pretrained(scratch)
    return scratch


def _architecture(config: PretrainedConfig) -> str:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CLASSES

    if config.model_type not in CLASSES:
        raise ValueError(f"Hugging Face has no causal language model of type {config.model_type}")
    return CLASSES[config.model_type]
