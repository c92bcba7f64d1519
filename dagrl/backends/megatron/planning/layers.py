"""Seconds of one layer, and of the head, on one rank of a Megatron engine, for a micro-batch of packed tokens.

Matrix products run at the rate of `device`, slower with few tokens or narrow matrices, and never faster than their
weights are read; attention by the squares of the rows' lengths; norms, rotary embedding, activation and residuals by
the bytes that they move. Tensor parallelism has four collectives each way (arXiv 2205.05198, section 4.2), context
parallelism a ring of keys and values hidden behind attention. Below some thousands of tokens a layer waits for the
host.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from dagrl.backends.families.parts import GATED_MLP_MATRICES
from dagrl.backends.families.shape import ModelShape, attention_weights, mlp_weights
from dagrl.backends.megatron.section import ParallelSpec
from dagrl.backends.planning.device_rates import DeviceRates

_BYTES = 2
"""A value in bfloat16."""
_HALF_SPEED_TOKENS = 256
"""Rows of a matrix product at which it reaches half of its rate: 1.7B at 16k and 32k tokens, 519 and 535 TFLOP/s."""
_HALF_SPEED_WIDTH = 96
"""The same for the narrower side of the matrix: tiles of 128 and more."""
_NORM_WIDTHS = 10
"""Values read and written for each one of the residual stream: two norms (4), two residual sums (6)."""
_QUERY_WIDTHS = 6
"""For each of queries and keys: split (2), norm (2), rotary embedding (2)."""
_ACTIVATION_WIDTHS = 3
"""For each of the MLP's width: two halves read, one written, in one kernel."""
_ROUTED_WIDTHS = 6
"""For each token and expert: permuted and brought back, with their weights."""
_ROUNDED_BYTES = 4
"""For each input of a linear layer in fp8: read in bfloat16, written in fp8 and, for the gradient, transposed."""
_LOGIT_PASSES = 3
"""Times that the logits are written or read in a forward pass; as often in a backward pass."""
_BACKWARD_PRODUCTS = 2.0
_BACKWARD_ATTENTION = 2.5
"""Five products to the forward's two (FlashAttention-2, arXiv 2307.08691)."""
_BACKWARD_BYTES = 2.0
_COLLECTIVES = 4
_COLLECTIVE_S = 30e-6
"""Start of a collective between GPUs."""
_LAUNCHES_S = {"dense": (1.5e-3, 2.0e-3), "mixture": (1.8e-3, 2.2e-3)}
"""Host time for a layer of Megatron with Transformer Engine, forward and backward: typical, not measured."""
_EXPERT_LAUNCHES_S = (0.31e-3, 0.5e-3)
"""Host time for each expert of a rank, whose products and gradients are launched one by one. Six layers of 30B-A3B, 64
experts a rank, took 28 ms each forward and 43 backward; all 48, with half as many experts and tokens a rank and a
second forward pass, 45 ms in all. GPUs would need a third of that. The host as the cause is an inference: times vary by
a third, and bare Megatron, with fused permutations, takes as long."""
_COLLECTIVE_LAUNCH_S = 0.5e-3
"""Host time for each collective of tensor parallelism, in which ranks wait for the slowest process: a layer of 1.7B
with TP2 and 16k tokens took 3.1 ms forward, and 4.7 on a busier host; the GPUs need 2.2."""
_ROUNDING_LAUNCHES_S = 0.5e-3
"""Host time to round inputs and weights of a layer to fp8. With that of `_SCALED_TOGETHER` a layer of 8B with TP2 waits
some 5 ms for the host; the share of the rounding in this is not measured."""
_SCALED_TOGETHER = 2
"""Inputs of a layer whose scale of the whole tensor is agreed on by tensor-parallel ranks."""


@dataclass(frozen=True, slots=True)
class Pack:
    """A micro-batch of one model replica."""

    tokens: float
    squares: float
    """Sum of the squares of its rows' tokens."""
    predictions: float
    """Positions that reach the head."""


@dataclass(frozen=True, slots=True)
class Seconds:
    """Seconds of a forward and of a backward pass, which includes recomputation."""

    forward: float
    backward: float

    def __add__(self, other: Seconds) -> Seconds:
        return Seconds(self.forward + other.forward, self.backward + other.backward)

    def times(self, factor: float) -> Seconds:
        return Seconds(self.forward * factor, self.backward * factor)


@dataclass(frozen=True, slots=True)
class Recompute:
    """The part of a layer's forward pass that is recomputed before its backward pass."""

    whole: float = 0.0
    """Share of the layers that are recomputed as a whole."""
    modules: frozenset[str] = frozenset()
    """Otherwise Megatron's names of the recomputed parts."""


@dataclass(frozen=True, slots=True)
class LayerSeconds:
    """Layers of one model in one layout."""

    shape: ModelShape
    parallel: ParallelSpec
    device: DeviceRates
    per_node: int
    recompute: Recompute = field(default_factory=Recompute)
    frozen: bool = False
    """Whether the matrices are frozen, as with adapters, whose own time is not counted."""
    fp8: str | None = None
    """The recipe, if linear layers are multiplied in fp8."""

    def of(self, pack: Pack, layer: int) -> Seconds:
        """Return the seconds of the layer on one of the ranks that share it."""
        mixture = self.shape.is_mixture(layer)
        products = self._attention_products(pack) + self._mlp_products(pack, mixture)
        attention, moved = self._attention(pack), self._moved(pack, mixture)
        reduced = self._tensor_parallel(pack)
        exchanged = self._experts_exchange(pack) if mixture else 0.0
        ring = self._ring(pack)
        to_launch, to_launch_back = self._launches(mixture)
        work = products + max(attention, ring) + moved + reduced + exchanged
        forward = self._beside(work, to_launch)
        backward = products * self._backward_products + moved * _BACKWARD_BYTES + reduced + exchanged
        backward += max(attention * _BACKWARD_ATTENTION, 2 * ring)
        # If a forward pass waits for the host, the host catches up in the backward pass.
        backward = self._beside(work + backward, to_launch + to_launch_back) - forward
        again = self.recompute.whole * forward
        if not self.recompute.whole:
            parts = {
                "core_attn": max(attention, ring),
                "mlp": self._mlp_products(pack, mixture) if not mixture else 0.0,
                "moe": self._mlp_products(pack, mixture) + exchanged if mixture else 0.0,
                "layernorm": moved * 0.2,
                "moe_act": moved * 0.2 if mixture else 0.0,
                "mla_up_proj": self._attention_products(pack) * 0.3 if self.shape.latent else 0.0,
            }
            again = sum(parts.get(module, 0.0) for module in self.recompute.modules)
        return Seconds(forward, backward + again)

    def head(self, pack: Pack, *, outputs: int | None = None, again: bool = False) -> Seconds:
        """Return the seconds of the head with `outputs` at each position; `again`: in the backward pass, too."""
        width = outputs or self.shape.vocabulary / self._tensor
        positions = pack.predictions / self.parallel.cp
        products = self._product(positions, self.shape.hidden * width, self.shape.hidden)
        logits = positions * width * _BYTES * _LOGIT_PASSES / self.device.memory
        backward = products * self._backward_products + logits
        return Seconds(products + logits, backward + (products + logits if again else 0.0))

    # -- parts of a layer

    @property
    def _backward_products(self) -> float:
        return _BACKWARD_PRODUCTS / 2 if self.frozen else _BACKWARD_PRODUCTS

    def _beside(self, work: float, to_launch: float) -> float:
        """Return the seconds of a device's work and of the host that launches it, which on a CPU does both."""
        return max(work, to_launch) if self.device.is_gpu else work + to_launch

    def _launches(self, mixture: bool) -> tuple[float, float]:
        forward, backward = _LAUNCHES_S["mixture" if mixture else "dense"]
        each_way = _ROUNDING_LAUNCHES_S if self.fp8 else 0.0
        if self._tensor > 1:
            scales = _SCALED_TOGETHER if self.fp8 and self.fp8 != "blockwise" else 0
            each_way += (_COLLECTIVES + scales) * _COLLECTIVE_LAUNCH_S
        forward += each_way
        backward += each_way
        if mixture and self.shape.experts is not None:
            held = self.shape.experts.count / self.parallel.ep
            forward += held * _EXPERT_LAUNCHES_S[0]
            backward += held * _EXPERT_LAUNCHES_S[1]
        return forward, backward

    @property
    def _tensor(self) -> int:
        return self.parallel.tp

    def _tokens(self, pack: Pack) -> float:
        return pack.tokens / self.parallel.cp

    def _product(self, rows: float, weights: float, width: float, *, fp8: str | None = None) -> float:
        """Return the seconds of `rows` times this rank's part of a matrix, whose narrower side is `width`."""
        if rows <= 0:
            return 0.0
        rate = self.device.matmul * (self.device.fp8_speedup(by_block=fp8 == "blockwise") if fp8 else 1.0)
        if self.device.is_gpu:
            rate *= rows / (rows + _HALF_SPEED_TOKENS) * width / (width + _HALF_SPEED_WIDTH)
        return max(2 * rows * weights / rate, weights * _BYTES / self.device.memory)

    def _attention_products(self, pack: Pack) -> float:
        width = self.shape.heads * self.shape.head_dim / self._tensor
        weights = attention_weights(self.shape.attention) / self._tensor
        return self._product(self._tokens(pack), weights, width, fp8=self.fp8)

    def _mlp_products(self, pack: Pack, mixture: bool) -> float:
        tokens, hidden, experts = self._tokens(pack), self.shape.hidden, self.shape.experts
        if not mixture or experts is None:
            width = self.shape.dense_width / self._tensor
            return self._product(tokens, mlp_weights(self.shape.mlp) / self._tensor, width, fp8=self.fp8)
        sizes = self.parallel
        width = experts.width / sizes.etp
        held = experts.count / sizes.ep
        # Tokens are spread evenly over experts, and experts over ranks.
        sent = tokens / self._tensor * experts.chosen * sizes.etp
        weights = GATED_MLP_MATRICES * hidden * width
        seconds = held * self._product(sent / held, weights, width, fp8=self.fp8)
        if experts.shared_width:
            shared = experts.shared_width / self._tensor
            seconds += self._product(tokens, GATED_MLP_MATRICES * hidden * shared, shared, fp8=self.fp8)
        return seconds

    def _attention(self, pack: Pack) -> float:
        pairs = pack.squares / 2 / self.parallel.cp
        return 2 * self.shape.attention.pair_products / self._tensor * pairs / self.device.attention

    def _moved(self, pack: Pack, mixture: bool) -> float:
        shape, tokens = self.shape, self._tokens(pack)
        whole = _NORM_WIDTHS * shape.hidden / (self._tensor if self.parallel.sequence_parallel else 1)
        parted = _QUERY_WIDTHS * (shape.heads + shape.key_value_heads) * shape.head_dim
        if mixture and shape.experts:
            experts = shape.experts
            parted += _ACTIVATION_WIDTHS * (experts.width * experts.chosen + experts.shared_width)
            parted += _ROUTED_WIDTHS * experts.chosen * shape.hidden
        else:
            parted += _ACTIVATION_WIDTHS * shape.dense_width
        rounded = self._rounded(mixture) / self._tensor if self.fp8 else 0.0
        return tokens * ((whole + parted / self._tensor) * _BYTES + rounded * _ROUNDED_BYTES) / self.device.memory

    def _rounded(self, mixture: bool) -> float:
        shape, mlp = self.shape, self.shape.dense_width
        if mixture and shape.experts:
            mlp = (shape.hidden + shape.experts.width) * shape.experts.chosen + shape.experts.shared_width
        return 2 * shape.hidden + shape.heads * shape.head_dim + mlp

    def _tensor_parallel(self, pack: Pack) -> float:
        if self._tensor == 1:
            return 0.0
        link = self.device.link(self._tensor, self.per_node)
        size = self._tokens(pack) * self.shape.hidden * _BYTES
        return _COLLECTIVES * (size * (self._tensor - 1) / self._tensor / link + _COLLECTIVE_S)

    def _ring(self, pack: Pack) -> float:
        ranks = self.parallel.cp
        if ranks == 1:
            return 0.0
        link = self.device.link(self._tensor * ranks, self.per_node)
        size = self._tokens(pack) * self.shape.cache_values_per_token / self._tensor * _BYTES
        return (ranks - 1) * (size / link + _COLLECTIVE_S)

    def _experts_exchange(self, pack: Pack) -> float:
        sizes, experts = self.parallel, self.shape.experts
        ranks = sizes.expert_ranks
        if ranks == 1 or experts is None:
            return 0.0
        link = self.device.link(ranks, self.per_node)
        size = self._tokens(pack) / self._tensor * experts.chosen * self.shape.hidden * _BYTES
        return 2 * (size * (ranks - 1) / ranks / link + _COLLECTIVE_S)
