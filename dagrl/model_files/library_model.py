"""A model's Hugging Face config, and its classes in transformers."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import fields
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from dagrl.config.schema import ModelSpec
from dagrl.imports import CODE_IS_NOT_RUN, UNUSED, import_transformers, models_alone, without_packages
from dagrl.model_files.hf_config import IMAGE, read_config
from dagrl.model_files.library_classes import UNDECLARED, auto_classes

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def model_imports(model: ModelSpec) -> AbstractContextManager[None]:
    """Context for imports of the model's classes that skips optional dependencies of transformers."""
    fields = read_config(model)
    return _class_imports(quantised="quantization_config" in fields, with_images="vision_config" in fields)


@contextmanager
def _class_imports(*, quantised: bool, with_images: bool) -> Iterator[None]:
    with _config_imports(quantised=quantised), models_alone(with_images=with_images):
        yield


def _config_imports(*, quantised: bool) -> AbstractContextManager[None]:
    import_transformers()
    # torchao reads weights that are stored quantised.
    return without_packages(*UNUSED) if quantised else without_packages(*UNUSED, "torchao")


def load_hf_config(model: ModelSpec) -> PretrainedConfig:
    """The Hugging Face config of ``model.path``, or the one described by ``model.init``.

    Vocabulary size and special token ids that `init` omits come from the tokenizer. Raises ValueError for a folder
    without a config, an unknown ``model_type`` or an unknown field.
    """
    with _config_imports(quantised=model.path is not None):
        if model.path is not None:
            return _config_of_folder(model.path.expanduser())
        if model.init is None:
            raise ValueError("model: give either path (a Hugging Face folder) or init (model_type and its fields)")
        return _config_of_fields(model, dict(model.init))


def auto_class(config: PretrainedConfig) -> Any:
    """The auto class of transformers that builds language models of this config, with or without a vision tower."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    causal, seeing = _language_models(config)
    return AutoModelForCausalLM if causal and not seeing else AutoModelForImageTextToText


def architecture(config: PretrainedConfig) -> str:
    """The class of transformers for language models of this config. ValueError if there is none."""
    causal, seeing = _language_models(config)
    name = seeing or causal
    if name is None:
        raise ValueError(f"Hugging Face has no language model of type {config.model_type}")
    return name


def _language_models(config: PretrainedConfig) -> tuple[str | None, str | None]:
    """Return the classes of this config's language model without and with a vision tower.

    Transformers also lists language models for some configs with a tower, whose weights have other names.
    """
    causal = auto_classes("MODEL_FOR_CAUSAL_LM").get(config.model_type)
    has_tower = causal is None or hasattr(config, "vision_config")
    return causal, auto_classes("MODEL_FOR_IMAGE_TEXT_TO_TEXT").get(config.model_type) if has_tower else None


def published_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and stored buffers of a Hugging Face model by the names of published checkpoints.

    The tensors are the model's own, or views of them: transformers stores a layer's experts in one tensor, checkpoints
    store them separately. Tied tensors are listed under each name.
    """
    from transformers.core_model_loading import revert_weight_conversion

    return revert_weight_conversion(model, model.state_dict(keep_vars=True))


def library_shapes(config: PretrainedConfig) -> Mapping[str, tuple[int, ...]]:
    """`published_shapes` of the Hugging Face model."""
    return _library_shapes(config.model_type, json.dumps(config.to_dict(), sort_keys=True, default=str))


def _config_of_folder(folder: Path) -> PretrainedConfig:
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder} has no config.json: model.path must be a Hugging Face model folder")
    try:
        # By default transformers asks on the terminal whether to run the folder's code.
        return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except StrictDataclassError as error:
        # This error's class cannot be pickled.
        raise ValueError(f"{folder / 'config.json'} is no valid config: {_last_line(error)}") from error
    except (ValueError, OSError, TypeError, LookupError, AttributeError) as error:
        why = CODE_IS_NOT_RUN if "trust_remote_code" in str(error) else _first_line(error)
        raise ValueError(f"cannot read {folder / 'config.json'}: {why}") from error


def _config_of_fields(model: ModelSpec, init: dict[str, Any]) -> PretrainedConfig:
    from huggingface_hub.errors import StrictDataclassError
    from transformers import CONFIG_MAPPING

    from dagrl.model_files.tokenizer import load_tokenizer

    model_type = init.pop("model_type", None)
    if model_type not in CONFIG_MAPPING:
        hint = _nearest(str(model_type), CONFIG_MAPPING.keys())
        raise ValueError(f"model.init.model_type: {model_type!r} is not a model type of Hugging Face{hint}")
    config_class = CONFIG_MAPPING[model_type]
    # The config class accepts any keyword; a misspelt one would silently leave the default.
    text_class = config_class.sub_configs.get("text_config")
    known = {field.name for each in (config_class, text_class) if each for field in fields(each)} | set(UNDECLARED)
    for name in init:
        if name not in known:
            raise ValueError(f"model.init.{name}: {config_class.__name__} has no such field{_nearest(name, known)}")
    tokenizer = load_tokenizer(model)
    from_tokenizer = {
        "vocab_size": len(tokenizer),
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    if (image := tokenizer.get_vocab().get(IMAGE)) is not None and "image_token_id" in known:
        from_tokenizer["image_token_id"] = image
    given = {**from_tokenizer, **init}
    if text_class is not None:
        # Some config classes do not move them.
        own = {field.name for field in fields(config_class)}
        text = {name: given.pop(name) for name in list(given) if name not in own}
        given["text_config"] = {**text, **(given.get("text_config") or {})}
    try:
        return config_class(**given)
    except StrictDataclassError as error:
        raise ValueError(f"model.init is no valid {config_class.__name__}: {_last_line(error)}") from error


@lru_cache(maxsize=4)
def _library_shapes(model_type: str, fields: str) -> Mapping[str, tuple[int, ...]]:
    read = json.loads(fields)
    with _class_imports(quantised=False, with_images="vision_config" in read):
        from transformers import CONFIG_MAPPING

        config = CONFIG_MAPPING[model_type].from_dict(read)
        with torch.device("meta"):
            model = auto_class(config).from_config(config)
    tied = set(getattr(model, "all_tied_weights_keys", ()))
    return {name: tuple(t.shape) for name, t in published_tensors(model).items() if name not in tied}


def _nearest(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def _last_line(error: Exception) -> str:
    return str(error).splitlines()[-1].strip()


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
