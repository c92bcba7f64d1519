"""The shape of a model, which determines its tensors, memory and operations."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

from dagrl.backends.families.parts import (
    Attention,
    GatedExperts,
    GatedMlp,
    GroupedQueryAttention,
    LatentAttention,
    LinearAttention,
    Mlp,
    Tensors,
)
from dagrl.backends.families.vision import VisionTower


@dataclass(frozen=True, slots=True)
class LayerParameters:
    """Parameters of one layer, by how tensor-parallel ranks hold them."""

    attention: int
    """Matrices and biases of attention that the ranks share."""
    mlp: int
    """Matrices of the dense MLP, or of the shared experts, that the ranks share."""
    experts: int
    """Matrices of all routed experts, which expert-parallel ranks share."""
    whole: int
    """Parameters that every rank holds: norms, the router, compressing matrices."""

    @property
    def total(self) -> int:
        return self.attention + self.mlp + self.experts + self.whole


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a causal language model."""

    family: str
    """Its ``model_type``."""
    layers: int
    hidden: int
    vocabulary: int
    """Rows of the embedding, as published: without padding."""
    attention: Attention
    mlp: GatedMlp
    """The MLP of layers without experts."""
    experts: GatedExperts | None = None
    mixture_layers: tuple[bool, ...] = ()
    """Whether each layer has experts; empty for none."""
    tied: bool = False
    linear: LinearAttention | None = None
    """The attention of layers without keys and values."""
    linear_layers: tuple[bool, ...] = ()
    """Whether each layer has linear attention; empty for none."""
    norm_bias: bool = False
    vision: VisionTower | None = None
    """The tower of a vision-language model."""
    text_prefix: str = "model."
    """Prefix of published tensors, except the output layer and the tower."""

    @property
    def heads(self) -> int:
        return self.attention.heads

    @property
    def key_value_heads(self) -> int:
        return self.attention.key_value_heads

    @property
    def head_dim(self) -> int:
        """Width of a head; with latent attention, of its value."""
        return self.attention.head_dim

    @property
    def latent(self) -> LatentAttention | None:
        return self.attention if isinstance(self.attention, LatentAttention) else None

    @property
    def qk_norm(self) -> bool:
        """Whether queries and keys are normed, head by head."""
        return isinstance(self.attention, GroupedQueryAttention) and self.attention.qk_norm

    @property
    def dense_width(self) -> int:
        return self.mlp.width

    @property
    def positions(self) -> range:
        return range(self.layers)

    def is_mixture(self, layer: int) -> bool:
        return self.experts is not None and self.mixture_layers[layer]

    def is_linear(self, layer: int) -> bool:
        """Whether the layer's attention has no keys and values."""
        return self.linear is not None and self.linear_layers[layer]

    def layer(self, index: int) -> LayerParameters:
        return _parameters(self._attention(index), self._mlp(index))

    def layer_tensors(self, index: int) -> Tensors:
        """Tensors of that layer, without the layer's prefix; one entry stands for all experts."""
        return (*self._attention(index).tensors(), *self._mlp(index).tensors())

    @property
    def embedding(self) -> int:
        return self.vocabulary * self.hidden

    @property
    def output(self) -> int:
        """Parameters of the output layer that are not shared with the embedding."""
        return 0 if self.tied else self.embedding

    @property
    def final_norm(self) -> int:
        """Parameters of the norm after the last layer."""
        return self.hidden * (2 if self.norm_bias else 1)

    @property
    def parameters(self) -> int:
        layers = sum(self.layer(index).total for index in self.positions)
        tower = self.vision.parameters if self.vision else 0
        return self.embedding + layers + self.final_norm + self.output + tower

    @property
    def matrices(self) -> int:
        """Parameters of the linear layers of all blocks that tensor- and expert-parallel ranks share."""
        layers = [self.layer(index) for index in self.positions]
        return sum(layer.attention + layer.mlp + layer.experts for layer in layers)

    @property
    def active_parameters(self) -> int:
        """Parameters that one token uses: in a mixture, only the experts that it is sent to."""
        if self.experts is None:
            return self.parameters
        chosen = replace(self.experts, count=self.experts.chosen)
        routers = sum(self.mixture_layers) * self.hidden * (self.experts.count - self.experts.chosen)
        return replace(self, experts=chosen).parameters + routers

    @property
    def cache_values_per_token(self) -> int:
        """Values that the attention of one layer keeps for each token, on average."""
        return self.attention.cache_values_per_token * (self.layers - sum(self.linear_layers)) // self.layers

    def _attention(self, index: int) -> Attention | LinearAttention:
        return self.linear if self.linear is not None and self.is_linear(index) else self.attention

    def _mlp(self, index: int) -> Mlp:
        return self.experts if self.experts is not None and self.mixture_layers[index] else self.mlp


@cache
def _parameters(attention: Attention | LinearAttention, mlp: Mlp) -> LayerParameters:
    count = mlp.count if isinstance(mlp, GatedExperts) else 0
    shared = [tensor for tensor in mlp.tensors() if tensor.map.split]
    plain = [tensor for tensor in (*attention.tensors(), *mlp.tensors()) if not (tensor.map.split or tensor.buffer)]
    return LayerParameters(
        attention=sum(tensor.numel for tensor in attention.tensors() if tensor.map.split),
        mlp=sum(tensor.numel for tensor in shared if not tensor.per_expert),
        experts=count * sum(tensor.numel for tensor in mlp.tensors() if tensor.per_expert),
        whole=sum(tensor.numel for tensor in plain if not tensor.per_expert),
    )


@cache
def attention_weights(attention: Attention | LinearAttention) -> int:
    """Weights of the projections of one layer's attention, each of which is multiplied once with every token."""
    return sum(tensor.numel for tensor in attention.tensors() if tensor.is_linear)


@cache
def mlp_weights(mlp: Mlp) -> int:
    """Weights that one token uses in a layer's MLP: in a mixture, the router and the experts that it is sent to."""
    met = mlp.chosen if isinstance(mlp, GatedExperts) else 1
    return sum(tensor.numel * (met if tensor.per_expert else 1) for tensor in mlp.tensors() if tensor.is_linear)
