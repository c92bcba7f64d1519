"""The policy, and the groups of slots."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationInfo, field_validator

from dagrl.config.schema.section import Section, SlotsPerNode


class TokenizerSpec(Section):
    """A small tokenizer made from the pipeline file, for models that start from random weights."""

    kind: Literal["characters", "bytes", "messages"]
    """``characters``: one token for each character of `alphabet`; ``bytes``: one for each byte of UTF-8; ``messages``:
    bytes too, and a chat is its messages as JSON, for ``backend: endpoint``."""
    alphabet: Annotated[str, Field(validate_default=True)] = ""
    """The characters of the vocabulary (``characters`` only)."""
    images: bool = False
    """Add a token for a patch of an image, for vision models."""

    @field_validator("alphabet")
    @classmethod
    def _check_alphabet(cls, alphabet: str, info: ValidationInfo) -> str:
        doubled = [repr(character) for character, count in Counter(alphabet).items() if count > 1]
        if info.data.get("kind") != "characters" and alphabet:
            raise ValueError("a tokenizer of bytes has no alphabet; remove it")
        if info.data.get("kind") == "characters" and not alphabet:
            raise ValueError("a tokenizer of characters needs an alphabet; write all its characters here")
        if doubled:
            raise ValueError(f"holds {', '.join(doubled)} more than once; write each character once")
        return alphabet


class ModelSpec(Section):
    """The trained policy: a Hugging Face folder, a published model, or random weights of a stated shape."""

    path: Path | None = None
    """A Hugging Face folder with config.json, safetensors and a tokenizer; or the name of a published model:
    ``Qwen/Qwen3-8B``, ``Qwen/Qwen3-8B@REVISION``, ``modelscope:Qwen/Qwen3-8B``."""
    hub: str | None = None
    """The published model whose cached folder is `path`. dagrl sets it, for a run that is resumed elsewhere."""
    init: dict[str, Any] | None = None
    """Instead of `path`, random weights: the fields of a Hugging Face config, including ``model_type``."""
    tokenizer: Path | TokenizerSpec | None = None
    """A folder with a Hugging Face tokenizer, or a section that defines a small one. Default: the model's folder."""


class GroupSpec(Section):
    """A named set of GPUs, or of CPU slots on machines without GPUs."""

    nodes: Annotated[int, Field(ge=1, le=2**14)] = 1
    """Machines in the group."""
    min_nodes: Annotated[int, Field(ge=1, le=2**14)] | None = None
    """Fewest machines, for a group of generators alone: the run begins with as many as there are, goes on without those
    that are lost, and takes up to `nodes` when they join. Default: all. See docs/elastic.md."""
    gpus_per_node: SlotsPerNode = 0
    """GPUs on each; one engine rank each."""
    cpus_per_node: SlotsPerNode = 0
    """Instead of GPUs: CPU slots on each; one engine rank each."""
    gpu: str | None = None
    """The model of the GPUs, such as ``H200``: `dagrl plan` uses their memory and speed, and ``sleep: auto`` keeps
    engines of the group awake together where the plan finds room for all."""

    @property
    def is_cpu(self) -> bool:
        """Whether the group's ranks run without a GPU."""
        return self.gpus_per_node == 0

    @property
    def is_elastic(self) -> bool:
        return self.min_nodes is not None and self.min_nodes < self.nodes

    @property
    def ranks(self) -> int:
        """Engine ranks in the group, with all its machines."""
        return self.nodes * self.slots_per_node

    @property
    def slots_per_node(self) -> int:
        """Engine ranks on each machine."""
        return self.gpus_per_node or self.cpus_per_node
