"""Writes a model as a Hugging Face folder: config, safetensors, tokenizer and generation config."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from dagrl.config.schema import ModelSpec, TokenizerSpec
from dagrl.model_files.images import PROCESSOR_FILE, ImageSettings, image_settings
from dagrl.model_files.older_config import with_older_keys
from dagrl.model_files.tensor_names import PREDICTION_LAYERS, is_predicting

if TYPE_CHECKING:
    from transformers import PretrainedConfig

SHARD_BYTES = 5 * 10**9
"""Size of a weights file, which is held in memory; Hugging Face's default."""

_TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "tokenizer.model"),
    *("vocab.json", "vocab.txt", "merges.txt", "tiktoken.model", "tekken.json", "spiece.model"),
    *("sentencepiece.bpe.model", "chat_template.jinja", "chat_template.json"),
    *(PROCESSOR_FILE, "processor_config.json", "video_preprocessor_config.json"),
)
_MORE_TEMPLATES = "additional_chat_templates"
_GENERATION = "generation_config.json"


def write_hf_folder(
    folder: Path,
    hf_config: PretrainedConfig,
    architecture: str,
    weights: Iterable[tuple[str, torch.Tensor]],
    shard_bytes: int = SHARD_BYTES,
    source: Path | None = None,
) -> None:
    """Write weights unchanged, and a config with their dtype, to the existing `folder`.

    `architecture` is the Hugging Face class of the weights. If `weights` has no multi-token prediction layers, the
    config sets their number to 0. It has the keys of transformers 4 and 5, and the keys of the folder `source` of
    `hf_config`. Raises OSError if the folder cannot be written.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    written: list[tuple[Path, list[str]]] = []
    total, dtypes = 0, dict[torch.dtype, int]()
    for shard in _shards(weights, shard_bytes):
        path = folder / f"shard-{len(written)}.safetensors"
        try:
            save_file(shard, path, metadata={"format": "pt"})
        except SafetensorError as error:
            raise OSError(f"cannot write the weights to {folder}: {error}") from error
        written.append((path, list(shard)))
        for tensor in shard.values():
            total += tensor.nbytes
            dtypes[tensor.dtype] = dtypes.get(tensor.dtype, 0) + tensor.numel()
    _name_shards(folder, written, total)
    names = [name for _, shard_names in written for name in shard_names]
    config = copy.deepcopy(hf_config)
    config.architectures = [architecture]
    # A few tensors may have a dtype other than the model's, for instance a router's bias.
    config.dtype = max(dtypes, key=lambda dtype: dtypes[dtype])
    if getattr(config, PREDICTION_LAYERS, None) and not any(is_predicting(name, config) for name in names):
        setattr(config, PREDICTION_LAYERS, 0)
    if hasattr(config, "quantization_config"):
        # Copied from the original folder; these weights are not quantised.
        del config.quantization_config
    write_config(folder, config, source)
    for path in folder.glob("*.safetensors"):
        # safetensors makes its files readable by their owner only.
        shutil.copymode(folder / "config.json", path)


def write_config(folder: Path, config: PretrainedConfig, source: Path | None = None) -> None:
    """Write config.json with the keys of transformers 4 and 5 and of servers, and those of the folder `source`."""
    config.save_pretrained(folder)
    path = folder / "config.json"
    published = json.loads((source.expanduser() / "config.json").read_text()) if source else {}
    whole = with_older_keys(json.loads(path.read_text()), config.attribute_map, published)
    path.write_text(json.dumps(whole, indent=2, sort_keys=True) + "\n")


def copy_tokenizer(model: ModelSpec, folder: Path) -> None:
    """Copy the tokenizer of `model`, and its generation config if it has one, into `folder`.

    Files are copied unchanged; a tokenizer made from the pipeline file is saved. Does nothing without a tokenizer.
    """
    if isinstance(model.tokenizer, TokenizerSpec):
        from dagrl.model_files.tokenizer import make_tokenizer

        settings = image_settings(model)
        make_tokenizer(model.tokenizer, finds_images=settings is not None).save_pretrained(folder)
        path = folder / "tokenizer_config.json"
        # The class has another name in transformers 4, which both know.
        fields = json.loads(path.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}
        path.write_text(json.dumps(fields, indent=2) + "\n")
        if settings is not None:
            write_processor(folder, settings)
    elif source := model.tokenizer or model.path:
        for name in _TOKENIZER_FILES:
            if (file := source.expanduser() / name).is_file():
                shutil.copyfile(file, folder / name)
        if (templates := source.expanduser() / _MORE_TEMPLATES).is_dir():
            shutil.copytree(templates, folder / _MORE_TEMPLATES, copy_function=shutil.copyfile)
    if model.path and (file := model.path.expanduser() / _GENERATION).is_file():
        shutil.copyfile(file, folder / _GENERATION)


def write_processor(folder: Path, settings: ImageSettings) -> None:
    """Write the files of the image processor of a generated model, as in Qwen2-VL."""
    fields = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "processor_class": "Qwen2_5_VLProcessor",
        "patch_size": settings.patch,
        "merge_size": settings.merge,
        "temporal_patch_size": settings.frames,
        "image_mean": settings.mean,
        "image_std": settings.std,
        "size": {"shortest_edge": settings.min_pixels, "longest_edge": settings.max_pixels},
    }
    (folder / PROCESSOR_FILE).write_text(json.dumps(fields, indent=2) + "\n")


def _shards(weights: Iterable[tuple[str, torch.Tensor]], limit: int) -> Iterator[dict[str, torch.Tensor]]:
    """Group weights into shards of up to `limit` bytes; a larger tensor gets its own shard."""
    shard: dict[str, torch.Tensor] = {}
    filled = 0
    for name, tensor in weights:
        if shard and filled + tensor.nbytes > limit:
            yield shard
            shard, filled = {}, 0
        # A clone, because safetensors rejects tensors that share memory.
        shard[name] = tensor.detach().clone(memory_format=torch.contiguous_format)
        filled += tensor.nbytes
    if shard:
        yield shard


def _name_shards(folder: Path, written: list[tuple[Path, list[str]]], total: int) -> None:
    """Rename the files to the names that Hugging Face expects, which include their number."""
    if len(written) == 1:
        written[0][0].rename(folder / "model.safetensors")
        return
    files: dict[str, str] = {}
    for number, (path, names) in enumerate(written, start=1):
        final = f"model-{number:05d}-of-{len(written):05d}.safetensors"
        path.rename(folder / final)
        files |= dict.fromkeys(names, final)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(files.items()))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
