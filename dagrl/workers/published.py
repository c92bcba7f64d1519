"""A worker's part in the exchange with other parts of a pipeline: weights in folders."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from dagrl.backends.base import GenerateEngine, TrainEngine
from dagrl.config.schema import ModelSpec
from dagrl.workers.recording import BUCKET_BYTES

if TYPE_CHECKING:
    from dagrl.weight_sync.manifest import Bucket


def write_weights(engine: TrainEngine, model: ModelSpec, folder: Path, *, writes: bool) -> None:
    """Write the weights of an engine as a Hugging Face folder. Collective; one rank `writes`, and has them.

    Raises OSError.
    """
    from dagrl.model_files.hf_folder import copy_tokenizer, write_hf_folder
    from dagrl.model_files.library_model import architecture, load_hf_config

    weights = (tensor for bucket in engine.export_weights(BUCKET_BYTES) for tensor in bucket)
    if not writes:
        assert next(weights, None) is None, "only one rank has the weights"
        return
    folder.mkdir(parents=True, exist_ok=True)
    config = load_hf_config(model)
    write_hf_folder(folder, config, architecture(config), weights, source=model.path)
    copy_tokenizer(model, folder)


def read_weights(engine: GenerateEngine, folder: Path, version: int) -> None:
    """Load the weights that `write_weights` has written. Raises OSError or ValueError."""
    from dagrl.model_files.stored_weights import SafetensorsFolder

    source = SafetensorsFolder(folder)

    def buckets() -> Iterator[Bucket]:
        bucket: Bucket = []
        held = 0
        for name in source.names():
            bucket.append((name, source.get(name)))
            held += bucket[-1][1].nbytes
            if held >= BUCKET_BYTES:
                yield bucket
                bucket, held = [], 0
        yield bucket

    engine.load_weights(buckets(), version)
