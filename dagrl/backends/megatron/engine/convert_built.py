"""Megatron checkpoints to Hugging Face tensors for families without tables: by the whole model, in one process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

from dagrl.backends.megatron.engine import distributed
from dagrl.backends.megatron.engine.bridge import exported_tensors
from dagrl.backends.megatron.engine.config import transformer_config
from dagrl.backends.megatron.engine.model import build_model
from dagrl.backends.megatron.engine.stored_weights import load_start_weights
from dagrl.backends.megatron.section import MegatronEngineSpec
from dagrl.backends.megatron.stored.stored_tensors import EMBEDDING, StoredTensors
from dagrl.backends.megatron.stored_folder import newest_checkpoint

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def tensors_of_checkpoint(folder: Path, hf_config: PretrainedConfig) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of the Hugging Face model, in the stored dtype. Holds the model in memory, on a GPU if there is one.

    Raises ValueError for a folder that is not a checkpoint of this model.
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
