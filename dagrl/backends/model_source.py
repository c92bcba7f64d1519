"""A model's Hugging Face config and initial weights, read from a folder or drawn at random.

All engines use this module, so that those of one pipeline have identical weights, in any backend and parallel layout.
"""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import fields
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from dagrl.backends.families.registry import buildable, find_family
from dagrl.backends.families.tensors import OUTPUT, SCORE
from dagrl.backends.families.tensors import published_tensors as published_tensors_of
from dagrl.config.errors import counted
from dagrl.config.schema import ModelSpec
from dagrl.imports import CODE_IS_NOT_RUN, UNUSED, import_transformers, models_alone, without_packages
from dagrl.models.hf_config import IMAGE, read_config
from dagrl.models.library_classes import UNDECLARED, auto_classes

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_INDEX = "model.safetensors.index.json"
_SINGLE_FILE = "model.safetensors"
_TRAINABLE = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


class WeightSource(Protocol):
    """The full initial weights of a model by the names of published checkpoints."""

    def names(self) -> list[str]:
        """All tensors; a tied output layer is not listed."""
        ...

    def get(self, name: str) -> torch.Tensor:
        """The tensor on the CPU, in its stored dtype. Raises ValueError for an unknown name."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Its shape, without reading it. Raises ValueError for an unknown name."""
        ...


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
    # torchao is for weights that are stored quantised.
    return without_packages(*UNUSED) if quantised else without_packages(*UNUSED, "torchao")


def load_hf_config(model: ModelSpec) -> PretrainedConfig:
    """The Hugging Face config of ``model.path``, or the one described by ``model.init``.

    Vocabulary size and special token ids that `init` omits are the tokenizer's. Raises ValueError for a folder without
    a config, an unknown ``model_type`` or an unknown field.
    """
    with _config_imports(quantised=model.path is not None):
        if model.path is not None:
            return _config_of_folder(model.path.expanduser())
        if model.init is None:
            raise ValueError("model: give either path (a Hugging Face folder) or init (model_type and its fields)")
        return _config_of_fields(model, dict(model.init))


def weight_source(model: ModelSpec, seed: int) -> WeightSource:
    """The initial weights of `model`; `seed` is for random ones. Raises ValueError for quantised weights."""
    config = load_hf_config(model)
    if model.path is None:
        return RandomWeights(config, seed)
    if getattr(config, "quantization_config", None):
        raise ValueError(
            f"{model.path / 'config.json'} says that the weights are quantised (quantization_config), and cannot be "
            "trained; save the model dequantised, in bfloat16 and without quantization_config"
        )
    return SafetensorsFolder(model.path.expanduser(), tied_output=config.tie_word_embeddings)


class SafetensorsFolder:
    """Weights in a folder of safetensors, with or without an index; one tensor is in memory at a time."""

    def __init__(self, folder: Path, *, tied_output: bool = False) -> None:
        self._folder = folder
        self._files = _files_by_tensor(folder)
        if tied_output:
            self._files.pop(OUTPUT, None)

    def names(self) -> list[str]:
        """All tensors of the folder."""
        return list(self._files)

    def get(self, name: str) -> torch.Tensor:
        """Read one tensor. Raises ValueError for integers, 8-bit floats, NaN and infinite values."""
        with self._open(name) as file:
            tensor: torch.Tensor = file.get_tensor(name)
        place = f"{self._files[name]}: tensor {name!r} {list(tensor.shape)}"
        if tensor.dtype not in _TRAINABLE:
            kind = str(tensor.dtype).removeprefix("torch.")
            raise ValueError(f"{place} is {kind}; weights must be 16- to 64-bit floats; save the model dequantised")
        check_finite(tensor, place)
        return tensor

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape from the file's header."""
        with self._open(name) as file:
            return tuple(file.get_slice(name).get_shape())

    @contextmanager
    def _open(self, name: str) -> Iterator[Any]:
        from safetensors import SafetensorError, safe_open

        if name not in self._files:
            raise ValueError(f"{self._folder} has no tensor {name!r}: is its config.json that of these weights?")
        file = self._files[name]
        try:
            with safe_open(file, framework="pt") as opened:
                yield opened
        except SafetensorError as error:
            raise ValueError(f"cannot read tensor {name!r} in {file}: {error}; copy the file again") from error


class RandomWeights:
    """Randomly initialised weights. Each tensor has its own random stream, seeded by its name.

    So a tensor does not depend on the rank or the order of requests. Matrices are normal with the config's
    ``initializer_range`` as standard deviation, norms multiply with 1 and biases are 0, as in Hugging Face's
    initialisation.
    """

    def __init__(self, config: PretrainedConfig, seed: int) -> None:
        self._config = config
        self._seed = seed
        family = find_family(config.model_type)
        self._zero_centred_norms = family is not None and family.zero_centred_norms

    def names(self) -> list[str]:
        """All tensors of the Hugging Face model."""
        return list(self._shapes)

    def get(self, name: str) -> torch.Tensor:
        """Draw one tensor, float32."""
        shape = self.shape(name)
        if len(shape) == 1:
            zero = name.endswith("bias") or (self._zero_centred_norms and name.endswith("norm.weight"))
            return torch.zeros(shape) if zero else torch.ones(shape)
        digest = hashlib.sha256(f"{self._seed}/{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8]) >> 1)
        deviation = self._config.get_text_config().initializer_range
        return torch.empty(shape).normal_(0.0, deviation, generator=generator)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape in the Hugging Face model, which includes a score head if requested."""
        if name == SCORE:
            return 1, self._config.get_text_config().hidden_size
        if name not in self._shapes:
            raise ValueError(f"a {self._config.model_type} model has no tensor {name!r}")
        return self._shapes[name]

    @cached_property
    def _shapes(self) -> Mapping[str, tuple[int, ...]]:
        return published_shapes(self._config)


def check_finite(weights: torch.Tensor, place: str) -> None:
    """Raise ValueError if a tensor has NaN or infinite values, which would otherwise fail later without a reason."""
    # One pass without temporary memory; both results are NaN if any value is.
    if weights.numel() and not all(map(torch.isfinite, torch.aminmax(weights.detach()))):
        raise ValueError(f"{place} has NaN or infinite values; copy it again, or use another checkpoint")


def published_shapes(config: PretrainedConfig) -> Mapping[str, tuple[int, ...]]:
    """Shapes of a causal language model's tensors by the names of published checkpoints; tied ones once."""
    fields = config.to_dict()
    try:
        family, known = buildable(fields)
    except ValueError:
        return library_shapes(config)
    if not family.has_tables:
        return library_shapes(config)
    # Without the library's model class, whose import takes seconds.
    return dict(published_tensors_of(family.shape(known)))


def library_shapes(config: PretrainedConfig) -> Mapping[str, tuple[int, ...]]:
    """`published_shapes` of the Hugging Face model."""
    return _library_shapes(config.model_type, json.dumps(config.to_dict(), sort_keys=True, default=str))


def auto_class(config: PretrainedConfig) -> Any:
    """The auto class of transformers that builds language models of this config, with or without a vision tower."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return (
        AutoModelForCausalLM if config.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES else AutoModelForImageTextToText
    )


def architecture(config: PretrainedConfig) -> str:
    """The class of transformers for language models of this config. ValueError if there is none."""
    known = (auto_classes("MODEL_FOR_CAUSAL_LM"), auto_classes("MODEL_FOR_IMAGE_TEXT_TO_TEXT"))
    found = next((names[config.model_type] for names in known if config.model_type in names), None)
    if found is None:
        raise ValueError(f"Hugging Face has no language model of type {config.model_type}")
    return found


def published_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and stored buffers of a Hugging Face model by the names of published checkpoints.

    The tensors are the model's own, or views of them: transformers stores a layer's experts in one tensor, checkpoints
    store them separately. Tied tensors are listed under each name.
    """
    from transformers.core_model_loading import revert_weight_conversion

    return revert_weight_conversion(model, model.state_dict(keep_vars=True))


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

    from dagrl.data.tokenizer import load_tokenizer

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
        # Not every config class moves them itself.
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


def _files_by_tensor(folder: Path) -> dict[str, Path]:
    """The file of each tensor. Raises ValueError if there is none, or if a file named by the index is missing."""
    from safetensors import SafetensorError, safe_open

    index = folder / _INDEX
    if index.is_file():
        files = {name: folder / file for name, file in json.loads(index.read_text())["weight_map"].items()}
        for file in sorted(set(files.values())):
            if not file.is_file():
                lost = sum(holder == file for holder in files.values())
                holds = counted(lost, "tensor")
                raise ValueError(f"{file} is missing: {index.name} says that it holds {holds}; copy it again")
        return files
    single = folder / _SINGLE_FILE
    if not single.is_file():
        raise ValueError(f"{folder} has neither {_SINGLE_FILE} nor {_INDEX}: save the model as safetensors")
    try:
        with safe_open(single, framework="pt") as file:
            return dict.fromkeys(file.keys(), single)
    except SafetensorError as error:
        raise ValueError(f"cannot read {single}: {_first_line(error)}; copy the file again") from error


def _nearest(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def _last_line(error: Exception) -> str:
    return str(error).splitlines()[-1].strip()


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
