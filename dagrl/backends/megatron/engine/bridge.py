"""Loads and exports Hugging Face weights with megatron-bridge, like `hf_weights` and `export`.

For families without tables. When exporting, every rank briefly holds each full tensor,
where `export` collects them on rank 0 only.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, redirect_stdout
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

from dagrl.backends.megatron.engine import distributed
from dagrl.backends.megatron.engine.bridge_library import import_bridge
from dagrl.backends.megatron.engine.config import transformer_config
from dagrl.backends.megatron.engine.model import build_model, unwrap
from dagrl.backends.megatron.engine.stored_weights import load_start_weights
from dagrl.backends.megatron.section import MegatronEngineSpec, padded_vocab_size
from dagrl.backends.megatron.stored.stored_tensors import EMBEDDING, StoredTensors
from dagrl.backends.megatron.stored_folder import newest_checkpoint
from dagrl.backends.runtime.initial_weights import WeightSource, published_shapes
from dagrl.model_files.tensor_names import check_names
from dagrl.weight_sync.exporter import IteratedExporter

if TYPE_CHECKING:
    from megatron.bridge.models.conversion.model_bridge import WeightConversionTask
    from transformers import PretrainedConfig

_EMBEDDING, _OUTPUT = "model.embed_tokens.weight", "lm_head.weight"


@torch.no_grad()
def load_hf_weights(chunks: Sequence[torch.nn.Module], hf_config: PretrainedConfig, source: WeightSource) -> None:
    """Set every parameter of the model from `source`, in the parameters' dtype. Collective.

    ValueError on all ranks if a tensor is missing, has a wrong shape, or is not part of the model.
    """
    models = _models(chunks, hf_config)
    rows = padded_vocab_size(hf_config.vocab_size, parallel_state.get_tensor_model_parallel_world_size())
    bridge = import_bridge().auto_bridge(hf_config, source, dict.fromkeys((_EMBEDDING, _OUTPUT), rows))
    _check_weights(bridge.get_conversion_tasks(models), hf_config, source)
    # Suppresses a progress bar.
    with redirect_stdout(io.StringIO()):
        bridge.load_hf_weights(models)


def make_exporter(
    chunks: Sequence[torch.nn.Module],
    hf_config: PretrainedConfig,
    bucket_bytes: int,
    present: Callable[[], AbstractContextManager[None]] = nullcontext,
    *,
    by_owner: bool = False,
) -> IteratedExporter:
    """As `export.make_exporter`, except that rank 0 owns all buckets. Collective."""
    device = next(unwrap(chunks[0]).parameters()).device
    return IteratedExporter(partial(exported_tensors, chunks, hf_config), bucket_bytes, device, present)


def exported_tensors(
    chunks: Sequence[torch.nn.Module], hf_config: PretrainedConfig
) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor, the same on each rank; collective. They may share the model's memory."""
    models = _models(chunks, hf_config)
    bridge = import_bridge().auto_bridge(hf_config)
    for name, tensor in bridge.export_hf_weights(models, cpu=False, show_progress=False):
        if name == _OUTPUT and hf_config.tie_word_embeddings:
            continue
        yield name, tensor[: hf_config.vocab_size] if name in (_EMBEDDING, _OUTPUT) else tensor


def _models(chunks: Sequence[torch.nn.Module], hf_config: PretrainedConfig) -> list[torch.nn.Module]:
    models = [unwrap(chunk) for chunk in chunks]
    for model in models:
        model.config.share_embeddings_and_output_weights = hf_config.tie_word_embeddings  # type: ignore[union-attr]
    return models


def _check_weights(
    tasks: Sequence[WeightConversionTask | None], hf_config: PretrainedConfig, source: WeightSource
) -> None:
    """Reject tensors that megatron-bridge would drop, or that would fail on one rank while the others wait."""
    kind = hf_config.model_type
    if any(task is None for task in tasks):
        raise ValueError(f"megatron-bridge has no name for some weights of this {kind}, so it cannot be trained")
    wanted, stored = _names_on_all_ranks(tasks), set(source.names())
    missing = sorted(wanted - stored)
    if missing:
        raise ValueError(
            f"the weights have no tensor {missing[0]!r}: is the model's config.json that of these weights?"
        )
    check_names(stored, wanted, hf_config)
    shapes = published_shapes(hf_config)
    for name in sorted(wanted):
        if source.shape(name) != shapes[name]:
            raise ValueError(f"tensor {name!r} is {list(source.shape(name))}, but its config says {list(shapes[name])}")


def _names_on_all_ranks(tasks: Sequence[WeightConversionTask]) -> set[str]:
    """Hugging Face names of the whole model's weights; collective. A rank's tasks lack other ranks' experts."""
    own: set[str] = set()
    for task in tasks:
        names = task.mapping.hf_param
        own.update([names] if isinstance(names, str) else names.values())
    all_names: list[set[str]] = [set()] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(all_names, own)
    return set().union(*all_names)


def tensors_of_checkpoint(folder: Path, hf_config: PretrainedConfig) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of the Hugging Face model, in the stored dtype; holds the model in memory.

    ValueError for a folder that is not a checkpoint of this model.
    """
    stored = StoredTensors(newest_checkpoint(folder))
    stored.vocabulary_rows(hf_config.vocab_size)
    half = stored.tensors[EMBEDDING].dtype == torch.bfloat16
    engine = MegatronEngineSpec(backend="megatron", group="convert", transformer={"bf16": half})
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        parallel_state.initialize_model_parallel()
        model_parallel_cuda_manual_seed(engine.parallel.tp)
        chunks = build_model(hf_config, engine, transformer_config(hf_config, engine))
        load_start_weights(chunks, hf_config, folder)
        yield from exported_tensors(chunks, hf_config)
    finally:
        distributed.stop()
