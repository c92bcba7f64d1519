"""``backend: hf``: a Hugging Face model inside the worker's process."""

from __future__ import annotations

from typing import ClassVar, Literal

from dagrl.config.capability import Capability
from dagrl.config.schema.engine import EngineSpec
from dagrl.config.schema.section import PositiveInt


class HfEngineSpec(EngineSpec):
    """A Hugging Face model inside the worker: generates with small models or without a GPU, judges, or scores."""

    backend: Literal["hf"]
    """Transformers, inside the worker, with one replica for each rank."""
    head: Literal["lm", "reward"] = "lm"
    """``reward``: a sequence classifier with one label, for ``op: reward_model``. It does not generate, and takes no
    weights from another engine."""
    max_batch_size: PositiveInt = 256
    """Sequences decoded, or scored, at once."""

    capabilities: ClassVar = frozenset({Capability.GENERATE, Capability.JUDGE, Capability.REPLY})
    reads_messages: ClassVar = True
    takes_images: ClassVar = True
