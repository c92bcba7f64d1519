"""Low-rank adapters of an engine's model: megatron-bridge's modules, with the initial values of any layout.

`dagrl.backends.megatron.lora` names their tensors; `weight_plan` says which rank holds them.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from megatron.core.transformer import MegatronModule, TransformerConfig

from dagrl.backends.megatron.adapter_folder import PREFIX, WEIGHTS
from dagrl.backends.megatron.engine.bridge_library import import_peft
from dagrl.backends.megatron.engine.cpu.adapters import use_plain_layers
from dagrl.backends.megatron.engine.model import unwrap
from dagrl.backends.megatron.engine.stored_weights import check_all_finite
from dagrl.backends.megatron.engine.weight_plan import PlannedTensor, held_tensors, part_of, place, plan
from dagrl.backends.megatron.lora import LoraSpec, adapters, layer_name

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def add_adapters(
    chunks: list[MegatronModule], hf_config: PretrainedConfig, lora: LoraSpec, *, head: str, seed: int, trainable: bool
) -> None:
    """Add the adapters to the rank's `chunks` and freeze the model's own weights, except a value or reward head.

    The weights must be loaded. All layouts draw the same initial values from `seed`, or read them from ``lora.path``.
    Raises ValueError on all ranks if the folder's are not finite.
    """
    config = unwrap(chunks[0]).config
    own = plan(hf_config, config, head)
    names = {layer_name(tensor.mapped) for tensor in own if lora.adapts(tensor.mapped)}
    peft = import_peft()
    if not torch.cuda.is_available():
        use_plain_layers()
    layers = peft.LoRA(
        target_modules=sorted(name for name in names if name),
        dim=lora.rank,
        alpha=lora.alpha,
        dropout=lora.dropout,
        # An adapter that a rank's experts share would depend on the layout.
        share_expert_adapters=False,
    )
    layers(chunks, training=trainable)
    for wrapper in _wrappers(chunks):
        if not wrapper.adapter.base_linear_is_parallel:
            wrapper.adapter = ReplicatedAdapter(wrapper.to_wrap, lora)
    _end_dropout(chunks)
    for chunk in chunks:
        layer = getattr(unwrap(chunk), "output_layer", None)
        if head != "lm" and layer is not None:
            layer.requires_grad_(trainable)
    planned = adapter_plan(own, config, lora)
    held = held_tensors(chunks, planned)
    if lora.path is None:
        _draw(held, planned, lora, seed)
    else:
        _load(held, planned, lora.path)
        check_all_finite(chunks, lora.path)


def adapter_plan(own: Sequence[PlannedTensor], config: TransformerConfig, lora: LoraSpec) -> list[PlannedTensor]:
    """`A` and `B` of each adapter of a model of these tensors, one after the other, the same on every rank."""
    added = adapters((tensor.mapped for tensor in own), lora)
    return place((tensor for adapter in added for tensor in (adapter.a, adapter.b)), config)


@contextmanager
def without_adapters(chunks: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Context in which the adapters are disabled."""
    for wrapper in _wrappers(chunks):
        wrapper.disable_adapter_layers()
    try:
        yield
    finally:
        for wrapper in _wrappers(chunks):
            wrapper.enable_adapter_layers()


@contextmanager
def with_dropout(chunks: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Context with dropout in adapters, for updates only."""
    for wrapper in _wrappers(chunks):
        wrapper.adapter.dropout.train()
    try:
        yield
    finally:
        _end_dropout(chunks)


def _end_dropout(chunks: Sequence[torch.nn.Module]) -> None:
    for wrapper in _wrappers(chunks):
        wrapper.adapter.dropout.eval()


class ReplicatedAdapter(MegatronModule):
    """The adapter of a layer that each tensor-parallel rank has whole, such as latent attention's down projections.

    Megatron-bridge would split it over the ranks, which have different tokens with sequence parallelism.
    """

    base_linear_is_parallel = False

    def __init__(self, base: torch.nn.Module, lora: LoraSpec) -> None:
        super().__init__(config=base.config)
        weight = base.weight
        assert isinstance(weight, torch.Tensor)
        (outputs, inputs), like = weight.shape, {"dtype": weight.dtype, "device": weight.device}
        self.linear_in = torch.nn.Linear(inputs, lora.rank, bias=False, **like)
        self.linear_out = torch.nn.Linear(lora.rank, outputs, bias=False, **like)
        self.dropout = torch.nn.Dropout(lora.dropout)
        self._scale = lora.scale
        for layer in (self.linear_in, self.linear_out):
            # Megatron sums the gradients of such parameters over the ranks.
            layer.weight.sequence_parallel = self.config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        return self.linear_out(self.linear_in(self.dropout(x))) * self._scale


def _wrappers(chunks: Sequence[torch.nn.Module]) -> list[MegatronModule]:
    return [module for chunk in chunks for module in chunk.modules() if hasattr(module, "disable_adapter_layers")]


@torch.no_grad()
def _load(held: dict[str, torch.Tensor], planned: Sequence[PlannedTensor], folder: Path) -> None:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(folder / WEIGHTS, framework="pt") as file:
            for tensor in planned:
                if (parameter := held.get(tensor.mapped.megatron)) is not None:
                    full = [file.get_tensor(f"{PREFIX}{name}") for name in tensor.mapped.hf]
                    parameter.copy_(tensor.mapped.map.shard(full, part_of(tensor), tensor.parts))
    except (OSError, SafetensorError) as error:
        raise ValueError(f"cannot read the adapters in {folder}: {error}; is the folder on this machine?") from error


@torch.no_grad()
def _draw(held: dict[str, torch.Tensor], planned: Sequence[PlannedTensor], lora: LoraSpec, seed: int) -> None:
    for tensor in planned:
        parameter = held.get(tensor.mapped.megatron)
        if parameter is None:
            continue
        if tensor.mapped.megatron.partition(".adapter.")[2].startswith("linear_out"):
            parameter.zero_()
            continue
        # Named by a hash, so that a value depends neither on the layout nor on the other adapters.
        digest = hashlib.sha256(f"{seed} {tensor.mapped.megatron}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))
        full = torch.empty(tensor.mapped.shapes[0])
        if lora.init == "kaiming":
            torch.nn.init.kaiming_uniform_(full, a=math.sqrt(5), generator=generator)
        elif lora.init == "xavier":
            torch.nn.init.xavier_normal_(full, generator=generator)
        else:
            full.normal_(std=1 / lora.rank, generator=generator)
        parameter.copy_(tensor.mapped.map.shard([full], part_of(tensor), tensor.parts))
