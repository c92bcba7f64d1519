"""Plain-torch modules with Transformer Engine's class and parameter names, and a spec provider for them.

A model built with them has the same parameters as with Transformer Engine, so that weights and checkpoints have the
same names.
"""

from __future__ import annotations

from functools import partial
from typing import ClassVar

import torch
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.dist_checkpointing.utils import replace_prefix_for_sharding
from megatron.core.extensions import transformer_engine, transformer_engine_spec_provider
from megatron.core.extensions.transformer_engine import _set_expert_parameter_attributes
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt import experimental_attention_variant_module_specs, gpt_layer_specs, moe_module_specs
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import MegatronModule, mla_qk_norm_config, multi_latent_attention, transformer_block
from megatron.core.transformer.moe.experts import GroupedMLPSubmodules, TEGroupedMLP
from megatron.core.transformer.moe.moe_layer import ExpertsBuilder
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group, make_sharded_tensors_for_checkpoint

from dagrl.backends.megatron.engine.cpu.attention import Offsets, PackedAttention


def use_plain_modules() -> None:
    """Make layer specs for Transformer Engine use the modules of this file: Megatron's, and megatron-bridge's.

    The latter's import the classes by name, so this must come before its import.
    """
    specs = (transformer_engine_spec_provider, gpt_layer_specs, moe_module_specs)
    for module in (*specs, experimental_attention_variant_module_specs):
        module.TESpecProvider = PlainSpecProvider
    gpt_layer_specs.TENorm = transformer_block.LayerNormImpl = TENorm
    for plain in _PLAIN_MODULES:
        setattr(transformer_engine, plain.__name__, plain)
    # Latent attention imports its modules directly, not through the spec.
    multi_latent_attention.TELinear = TELinear
    mla_qk_norm_config.get_backend = _backend


class TENorm(torch.nn.Module):
    """The config's norm; its parameters are marked for sequence parallelism as Megatron does."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **unused: object) -> None:
        super().__init__()
        self.config, self.eps = config, eps
        self.weight: torch.Tensor
        self.bias: torch.Tensor | None
        _add_norm(self, config, hidden_size, "")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _normed(x, self.weight, self.bias, self.config, self.eps)


def _add_norm(module: torch.nn.Module, config: TransformerConfig, size: int, prefix: str) -> None:
    assert config.normalization in ("RMSNorm", "LayerNorm"), f"the CPU has no {config.normalization}"
    weight = torch.nn.Parameter(torch.ones(size, dtype=config.params_dtype))
    bias = torch.nn.Parameter(torch.zeros(size, dtype=config.params_dtype))
    for name, parameter in (("weight", weight), ("bias", bias if config.normalization == "LayerNorm" else None)):
        module.register_parameter(f"{prefix}{name}", parameter)
        if parameter is not None:
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


def _normed(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, config: TransformerConfig, eps: float
) -> torch.Tensor:
    if config.layernorm_zero_centered_gamma:
        weight = weight + 1
    if bias is not None:
        return torch.nn.functional.layer_norm(x, x.shape[-1:], weight, bias, eps)
    return torch.nn.functional.rms_norm(x, x.shape[-1:], weight, eps)


class TELinear(MegatronModule):
    """A linear layer replicated on all tensor-parallel ranks, for latent attention's down projections."""

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        parallel_mode: str,
        config: TransformerConfig,
        bias: bool,
        **unused: object,
    ) -> None:
        super().__init__(config=config)
        assert parallel_mode == "duplicated" and not bias, "the CPU supports only layers for latent attention"
        self.parallel_mode = None
        self.input_size, self.output_size = input_size, output_size
        self.weight = torch.nn.Parameter(torch.empty(output_size, input_size, dtype=config.params_dtype))
        marks = {"allreduce": True, "sequence_parallel": config.sequence_parallel, "tensor_model_parallel": False}
        for name, value in marks.items():
            setattr(self.weight, name, value)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        return torch.nn.functional.linear(x, self.weight), None


class TEColumnParallelLinear(ColumnParallelLinear):
    """A linear layer whose outputs tensor-parallel ranks share."""


class TERowParallelLinear(RowParallelLinear):
    """A linear layer whose inputs tensor-parallel ranks share."""


class TELayerNormColumnParallelLinear(ColumnParallelLinear):
    """A column-parallel linear layer after a norm, whose parameters begin with ``layer_norm_``."""

    def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, **kwargs: object) -> None:
        super().__init__(input_size, output_size, config=config, **kwargs)
        _add_norm(self, config, input_size, "layer_norm_")
        self.return_layernorm_output = False

    def forward(
        self, x: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor | tuple[torch.Tensor, torch.Tensor], torch.Tensor | None]:
        """Normalise over the hidden size, then multiply. Also returns the normed input if an adapter needs it."""
        epsilon = self.config.layernorm_epsilon
        normed = _normed(x, self.layer_norm_weight, self.layer_norm_bias, self.config, epsilon)
        output, bias = super().forward(normed, *args, **kwargs)
        return ((output, normed) if self.return_layernorm_output else output), bias


class _GroupedLinear(torch.nn.Module):
    """Linear layers of a rank's experts, ``weight0`` and on, with ``bias0`` and on if they have biases."""

    parallel_mode: ClassVar[str]
    split_axis: ClassVar[int]
    """Axis of a weight that expert tensor parallelism splits."""
    splits_bias: ClassVar[bool]

    def __init__(
        self,
        num_gemms: int,
        input_size: int,
        output_size: int,
        *,
        config: TransformerConfig,
        bias: bool,
        skip_bias_add: bool,
        is_expert: bool,
        pg_collection: ProcessGroupCollection | None = None,
        **unused: object,
    ) -> None:
        super().__init__()
        assert is_expert, "only experts are grouped"
        self.use_bias, self._returns_bias = bias, bias and skip_bias_add
        self._groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups()
        self.config, self.num_gemms = config, num_gemms
        self.input_size, self.output_size = input_size, output_size
        shape = [output_size, input_size]
        shape[self.split_axis] //= self._groups.expt_tp.size()
        outputs = shape[0] if self.splits_bias else output_size
        for expert in range(num_gemms):
            weight = torch.nn.Parameter(torch.empty(shape, dtype=config.params_dtype))
            self.register_parameter(f"weight{expert}", weight)
            if bias:
                zeros = torch.nn.Parameter(torch.zeros(outputs, dtype=config.params_dtype))
                self.register_parameter(f"bias{expert}", zeros)
        own_groups = (
            config.expert_model_parallel_size > 1
            or config.expert_tensor_parallel_size != config.tensor_model_parallel_size
        )
        _set_expert_parameter_attributes(self, self.parallel_mode, own_groups)

    def forward(self, x: torch.Tensor, m_splits: list[int]) -> tuple[torch.Tensor, list[torch.Tensor] | None]:
        """Multiply each expert's tokens, `m_splits` consecutive ones each. Biases are added or returned."""
        biases = [getattr(self, f"bias{expert}") for expert in range(self.num_gemms)] if self.use_bias else None
        added = None if biases is None or self._returns_bias else biases
        outputs = [
            torch.nn.functional.linear(tokens, getattr(self, f"weight{expert}"), added[expert] if added else None)
            for expert, tokens in enumerate(x.split(m_splits))
        ]
        return torch.cat(outputs), biases if self._returns_bias else None

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Offsets = (), metadata: dict[str, object] | None = None
    ) -> ShardedStateDict:
        """The weights under Transformer Engine's keys: one entry for all experts, along its first axis."""
        metadata = ensure_metadata_has_dp_cp_group(metadata)
        experts = self._groups.ep.size() * self.num_gemms
        sharded: ShardedStateDict = {}
        for index in range(self.num_gemms):
            expert = self._groups.ep.rank() * self.num_gemms + index
            # Each expert under its own key, or as one entry along a new first axis.
            alone = metadata.get("singleton_local_shards", False)
            offsets = sharded_offsets if alone else (*sharded_offsets, (len(sharded_offsets), expert, experts))
            names = ("weight", "bias") if self.use_bias else ("weight",)
            axes = {"weight": self.split_axis, **({"bias": 0} if self.splits_bias else {})}
            entry = make_sharded_tensors_for_checkpoint(
                {f"{index}.{name}": getattr(self, f"{name}{index}") for name in names},
                "",
                {f"{index}.{name}": axis for name, axis in axes.items()},
                offsets,
                tp_group=self._groups.expt_tp,
                dp_cp_group=metadata["dp_cp_group"],
            )
            replace_prefix_for_sharding(entry, f"{index}.", f"{expert}.{prefix}" if alone else prefix)
            for name in names:
                tensor = entry[f"{index}.{name}"]
                tensor.replica_id = (*tensor.replica_id[:2], self._groups.expt_dp.rank())
                sharded[f"{prefix}{name}{index}"] = tensor
        return sharded


class TEColumnParallelGroupedLinear(_GroupedLinear):
    """Experts' first layers, their outputs split by expert tensor parallelism."""

    parallel_mode = "column"
    split_axis = 0
    splits_bias = True


class TERowParallelGroupedLinear(_GroupedLinear):
    """Experts' second layers, their inputs split by expert tensor parallelism."""

    parallel_mode = "row"
    split_axis = 1
    splits_bias = False


class TEDotProductAttention(PackedAttention):
    """Attention over packed sequences."""


class PlainSpecProvider(LocalSpecProvider):
    """Provides plain modules where Megatron asks for Transformer Engine's."""

    def linear(self) -> type:
        return TELinear

    def fuse_layernorm_and_linear(self) -> bool:
        return True

    def column_parallel_layer_norm_linear(self) -> type:
        return TELayerNormColumnParallelLinear

    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False, has_residual: bool = False) -> type:
        return TENorm

    def core_attention(self) -> type:
        return TEDotProductAttention

    def grouped_mlp_modules(self, moe_use_grouped_gemm: bool) -> ExpertsBuilder:
        if not moe_use_grouped_gemm:
            return super().grouped_mlp_modules(moe_use_grouped_gemm)
        linears = GroupedMLPSubmodules(linear_fc1=TEColumnParallelGroupedLinear, linear_fc2=TERowParallelGroupedLinear)
        return partial(TEGroupedMLP, submodules=linears)


_PLAIN_MODULES = (
    *(TENorm, TELinear, TEColumnParallelLinear, TERowParallelLinear, TELayerNormColumnParallelLinear),
    *(TEColumnParallelGroupedLinear, TERowParallelGroupedLinear, TEDotProductAttention),
)


def _backend(transformer_impl: str) -> PlainSpecProvider:
    assert transformer_impl == "transformer_engine", f"the engine does not build {transformer_impl}"
    return PlainSpecProvider()
