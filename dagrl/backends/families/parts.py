"""Parts of a layer that families are composed of: attention, gated MLPs and mixtures of experts.

A part knows its tensors, in published checkpoints and in Megatron, and the fields of Megatron's TransformerConfig that
describe it. The counts of parameters and of operations follow from the tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from dagrl.backends.families.config_fields import MegatronFields
from dagrl.backends.families.tensor_maps import GroupedQkv, MappedTensor, Parallel, Replicated, Sections

Tensors = tuple[MappedTensor, ...]

_DECAY = ("A_log", "dt_bias")

_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
GATED_MLP_MATRICES = len(_PROJECTIONS)
_INPUT_NORM, _MLP_NORM = "input_layernorm", "post_attention_layernorm"


@dataclass(frozen=True, slots=True)
class GroupedQueryAttention:
    """Attention in which several heads of queries share a head of keys and values."""

    hidden: int
    heads: int
    key_value_heads: int
    head_dim: int
    qkv_bias: bool = False
    qk_norm: bool = False
    """Whether queries and keys are normed, head by head."""
    norm_bias: bool = False
    post_norm: str = ""
    """The published name of a norm of the outputs; empty for none."""
    gated: bool = False
    """Whether each head's output is multiplied with the sigmoid of a gate, which is projected with the query."""

    @property
    def pair_products(self) -> int:
        """Multiply-adds on one query and one key."""
        return 2 * self.heads * self.head_dim

    @property
    def cache_values_per_token(self) -> int:
        return 2 * self.key_value_heads * self.head_dim

    def tensors(self) -> Tensors:
        queries, keys = self.heads * self.head_dim, self.key_value_heads * self.head_dim
        qkv = GroupedQkv(self.key_value_heads, self.head_dim, self.gated)
        rows = (queries * 2 if self.gated else queries, keys, keys)
        block = "self_attention.linear_qkv"

        def projections(kind: str) -> tuple[str, ...]:
            return tuple(f"self_attn.{name}_proj.{kind}" for name in "qkv")

        tensors = [
            *_norm(f"{block}.layer_norm_", _INPUT_NORM, self.hidden, biased=self.norm_bias),
            MappedTensor(f"{block}.weight", projections("weight"), tuple((count, self.hidden) for count in rows), qkv),
            _row_parallel("self_attention.linear_proj.weight", "self_attn.o_proj.weight", (self.hidden, queries)),
        ]
        if self.qk_norm:
            tensors += [
                _replicated(
                    f"self_attention.{name}_layernorm.weight", f"self_attn.{name}_norm.weight", (self.head_dim,)
                )
                for name in "qk"
            ]
        if self.qkv_bias:
            tensors.append(MappedTensor(f"{block}.bias", projections("bias"), tuple((count,) for count in rows), qkv))
        if self.post_norm:
            tensors += _norm("self_attention.linear_proj.post_layernorm.", self.post_norm, self.hidden)
        return tuple(tensors)

    def transformer_fields(self) -> MegatronFields:
        return {
            "num_attention_heads": self.heads,
            "num_query_groups": self.key_value_heads,
            "kv_channels": self.head_dim,
            **({"add_qkv_bias": True} if self.qkv_bias else {}),
            **({"qk_layernorm": True} if self.qk_norm else {}),
            **({"attention_output_gate": True} if self.gated else {}),
        }


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Multi-head latent attention ("DeepSeek-V2", arXiv 2405.04434, section 2.1)."""

    hidden: int
    heads: int
    query_rank: int | None
    """Width of the compressed queries; None if queries are not compressed."""
    key_rank: int
    """Width of the compressed keys and values."""
    plain_dim: int
    """Width of the part of a head's query and key without position."""
    rotary_dim: int
    """Width of the part with position; all heads share the key's."""
    value_dim: int

    @property
    def query_dim(self) -> int:
        return self.plain_dim + self.rotary_dim

    @property
    def key_value_heads(self) -> int:
        return self.heads

    @property
    def head_dim(self) -> int:
        return self.value_dim

    @property
    def pair_products(self) -> int:
        """Multiply-adds on one query and one key, laid out for each head, as training computes them."""
        return self.heads * (self.query_dim + self.value_dim)

    @property
    def cache_values_per_token(self) -> int:
        """The latent from which keys and values are expanded, and the rotated part of the key."""
        return self.key_rank + self.rotary_dim

    def tensors(self) -> Tensors:
        ours, theirs = "self_attention", "self_attn"
        keys = _replicated(
            f"{ours}.linear_kv_down_proj.weight",
            f"{theirs}.kv_a_proj_with_mqa.weight",
            (self.key_rank + self.rotary_dim, self.hidden),
        )
        queries = self.heads * self.query_dim
        if self.query_rank is None:
            down: Tensors = (
                _column_parallel(f"{ours}.linear_q_proj.weight", f"{theirs}.q_proj.weight", (queries, self.hidden)),
                keys,
            )
        else:
            up, rank = f"{ours}.linear_q_up_proj", self.query_rank
            down = (
                _replicated(f"{ours}.linear_q_down_proj.weight", f"{theirs}.q_a_proj.weight", (rank, self.hidden)),
                replace(keys, with_the_one_before=True),
                _replicated(f"{up}.layer_norm_weight", f"{theirs}.q_a_layernorm.weight", (rank,)),
                _column_parallel(f"{up}.weight", f"{theirs}.q_b_proj.weight", (queries, rank)),
            )
        up, rows = f"{ours}.linear_kv_up_proj", self.heads * (self.plain_dim + self.value_dim)
        return (
            *_norm("input_layernorm.", _INPUT_NORM, self.hidden),
            *down,
            _replicated(f"{up}.layer_norm_weight", f"{theirs}.kv_a_layernorm.weight", (self.key_rank,)),
            _column_parallel(f"{up}.weight", f"{theirs}.kv_b_proj.weight", (rows, self.key_rank)),
            _row_parallel(
                f"{ours}.linear_proj.weight", f"{theirs}.o_proj.weight", (self.hidden, self.heads * self.value_dim)
            ),
        )

    def transformer_fields(self) -> MegatronFields:
        return {
            "multi_latent_attention": True,
            # The norms of the latents, which belong to any model with latents.
            "qk_layernorm": True,
            "num_attention_heads": self.heads,
            "num_query_groups": self.heads,
            "kv_channels": self.value_dim,
            "q_lora_rank": self.query_rank,
            "kv_lora_rank": self.key_rank,
            "qk_head_dim": self.plain_dim,
            "qk_pos_emb_head_dim": self.rotary_dim,
            "v_head_dim": self.value_dim,
            # The option would change the parameters' names.
            "mla_down_proj_fusion": False,
        }


@dataclass(frozen=True, slots=True)
class LinearAttention:
    """A gated delta net ("Gated Delta Networks", arXiv 2412.06464), which keeps a state instead of keys and values."""

    hidden: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int
    """Tokens that the convolution of queries, keys and values spans."""

    def tensors(self) -> Tensors:
        ours, theirs = "self_attention", "linear_attn"
        keys, values = self.key_heads * self.key_dim, self.value_heads * self.value_dim
        mixed = (keys, keys, values)
        sections = {"qkv": mixed, "z": (values,), "b": (self.value_heads,), "a": (self.value_heads,)}
        return (
            *_norm(f"{ours}.in_proj.layer_norm_", _INPUT_NORM, self.hidden),
            MappedTensor(
                f"{ours}.in_proj.weight",
                tuple(f"{theirs}.in_proj_{name}.weight" for name in sections),
                tuple((sum(rows), self.hidden) for rows in sections.values()),
                Sections(tuple(sections.values()), ("query", "key", "value", "z", "beta", "alpha")),
            ),
            MappedTensor(
                f"{ours}.conv1d.weight",
                (f"{theirs}.conv1d.weight",),
                ((sum(mixed), 1, self.kernel),),
                Sections((mixed,), ("query", "key", "value")),
            ),
            *(_column_parallel(f"{ours}.{name}", f"{theirs}.{name}", (self.value_heads,)) for name in _DECAY),
            _replicated(f"{ours}.out_norm.weight", f"{theirs}.norm.weight", (self.value_dim,)),
            _row_parallel(f"{ours}.out_proj.weight", f"{theirs}.out_proj.weight", (self.hidden, values)),
        )

    def transformer_fields(self, layers: tuple[bool, ...]) -> MegatronFields:
        """Return the fields for a model with gated delta nets in these `layers`."""
        return {
            "experimental_attention_variant": "gated_delta_net",
            "linear_attention_freq": [int(linear) for linear in layers],
            "linear_num_key_heads": self.key_heads,
            "linear_num_value_heads": self.value_heads,
            "linear_key_head_dim": self.key_dim,
            "linear_value_head_dim": self.value_dim,
            "linear_conv_kernel_dim": self.kernel,
        }


@dataclass(frozen=True, slots=True)
class GatedMlp:
    """Gate, up and down projection, with the norm before them."""

    hidden: int
    width: int
    gated: bool = True
    norm: str = _MLP_NORM
    norm_bias: bool = False
    post_norm: str = ""
    """The published name of a norm of the outputs; empty for none."""

    def tensors(self) -> Tensors:
        projections = _PROJECTIONS if self.gated else _PROJECTIONS[1:]
        tensors = _norm("mlp.linear_fc1.layer_norm_", self.norm, self.hidden, biased=self.norm_bias)
        tensors += _gated("mlp.linear_fc{}.weight", "mlp", projections, self.hidden, self.width)
        if self.post_norm:
            tensors += _norm("mlp.linear_fc2.post_layernorm.", self.post_norm, self.hidden)
        return tensors


@dataclass(frozen=True, slots=True)
class GatedExperts:
    """A mixture of gated MLPs behind a router, with the norm before it."""

    hidden: int
    count: int
    """Routed experts."""
    chosen: int
    """Number of experts for each token."""
    width: int
    shared_width: int = 0
    """Total width of the shared experts."""
    shared_block: str = "shared_experts"
    """Name of the shared experts in published checkpoints."""
    shared_gate: bool = False
    """Whether a sigmoid of each token weighs their output."""
    biased: bool = False
    """Whether the router has a bias that only affects the choice: a float32 buffer without gradient."""
    block: str = "mlp"
    """Name of the block in published checkpoints."""
    projections: tuple[str, str, str] = _PROJECTIONS
    """Names of an expert's gate, up and down projection in published checkpoints."""

    def tensors(self) -> Tensors:
        gate, experts = f"{self.block}.gate", f"{self.block}.experts.{{expert}}"
        tensors = [
            *_norm("pre_mlp_layernorm.", _MLP_NORM, self.hidden),
            _replicated("mlp.router.weight", f"{gate}.weight", (self.count, self.hidden)),
            *_gated("mlp.experts.linear_fc{}.weight{{expert}}", experts, self.projections, self.hidden, self.width),
        ]
        if self.biased:
            bias = _replicated("mlp.router.expert_bias", f"{gate}.e_score_correction_bias", (self.count,))
            tensors.append(replace(bias, buffer=True))
        if self.shared_width:
            ours, theirs = "mlp.shared_experts.linear_fc{}.weight", f"{self.block}.{self.shared_block}"
            tensors += _gated(ours, theirs, _PROJECTIONS, self.hidden, self.shared_width)
        if self.shared_gate:
            ours, theirs = "mlp.shared_experts.gate_weight", f"{self.block}.{self.shared_block}_gate.weight"
            tensors.append(_replicated(ours, theirs, (1, self.hidden)))
        return tuple(tensors)

    def transformer_fields(self, mixture_layers: Sequence[bool]) -> MegatronFields:
        return {
            "num_moe_experts": self.count,
            "moe_ffn_hidden_size": self.width,
            # For Megatron a list means that layers differ.
            "moe_layer_freq": 1 if all(mixture_layers) else [int(mixture) for mixture in mixture_layers],
            "moe_router_topk": self.chosen,
            **({"moe_shared_expert_intermediate_size": self.shared_width} if self.shared_width else {}),
            **({"moe_shared_expert_gate": True} if self.shared_gate else {}),
        }


Attention = GroupedQueryAttention | LatentAttention
Mlp = GatedMlp | GatedExperts

MIXTURE_DEFAULTS: MegatronFields = {
    "moe_grouped_gemm": True,
    # The only dispatcher except `flex` for packs of uneven length.
    "moe_token_dispatcher_type": "alltoall",
    # Rewards alone change the weights, unless the user enables balancing of experts.
    "moe_router_load_balancing_type": "none",
    "moe_aux_loss_coeff": 0.0,
    # The choice of experts depends on the last bits.
    "moe_router_dtype": "fp32",
}
"""Fields of TransformerConfig that suit every mixture, and that a pipeline file may change."""


def _norm(megatron: str, hf: str, size: int, *, biased: bool = False) -> Tensors:
    kinds = ("weight", "bias") if biased else ("weight",)
    return tuple(_replicated(f"{megatron}{kind}", f"{hf}.{kind}", (size,)) for kind in kinds)


def _gated(megatron: str, block: str, projections: Sequence[str], hidden: int, width: int) -> Tensors:
    *up, down = (f"{block}.{name}.weight" for name in projections)
    return (
        MappedTensor(megatron.format(1), tuple(up), ((width, hidden),) * len(up), Parallel(dim=0)),
        _row_parallel(megatron.format(2), down, (hidden, width)),
    )


def _replicated(megatron: str, hf: str, shape: tuple[int, ...]) -> MappedTensor:
    return MappedTensor(megatron, (hf,), (shape,), Replicated())


def _column_parallel(megatron: str, hf: str, shape: tuple[int, ...]) -> MappedTensor:
    return MappedTensor(megatron, (hf,), (shape,), Parallel(dim=0))


def _row_parallel(megatron: str, hf: str, shape: tuple[int, ...]) -> MappedTensor:
    return MappedTensor(megatron, (hf,), (shape,), Parallel(dim=1))
