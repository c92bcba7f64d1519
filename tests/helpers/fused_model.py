"""A model that loads as SGLang's do: fused projections, slices for tensor-parallel ranks, experts in one parameter.

Import as ``from fused_model import Model``: pytest's `pythonpath` holds this folder.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

HIDDEN, HEADS, KEY_HEADS, HEAD_DIM, FFN, EXPERTS, VOCABULARY = 8, 4, 2, 4, 12, 4, 11


class Layer(nn.Module):
    def __init__(self, parts: int) -> None:
        super().__init__()
        self.qkv = parameter((HEADS + 2 * KEY_HEADS) * HEAD_DIM // parts, HIDDEN)
        self.o = parameter(HIDDEN, HEADS * HEAD_DIM // parts)
        self.norm = parameter(HIDDEN)
        self.w13 = parameter(EXPERTS, 2 * FFN // parts, HIDDEN)
        self.w2 = parameter(EXPERTS, HIDDEN, FFN // parts)


class Model(nn.Module):
    """One rank's part of a model of some layers, shared by `parts` ranks."""

    def __init__(self, rank: int = 0, parts: int = 1, layers: int = 2, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.rank, self.parts = rank, parts
        # Padded, as vocabularies are.
        self.embed = parameter(12 // parts, HIDDEN)
        self.layers = nn.ModuleList(Layer(parts) for _ in range(layers))
        self.to(dtype)
        for tensor in self.parameters():
            tensor.data.fill_(float("nan"))

    def slice(self, tensor: Tensor, dim: int) -> Tensor:
        length = tensor.shape[dim] // self.parts
        return tensor.narrow(dim, self.rank * length, length)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in weights:
            kind, *rest = name.split(".")
            if kind == "embed":
                each = len(self.embed)
                rows = tensor[self.rank * each : (self.rank + 1) * each]
                self.embed[: len(rows)].data.copy_(rows)
                self.embed[len(rows) :].data.fill_(0)
                continue
            if kind != "layers":
                continue
            layer, what = self.layers[int(rest[0])], rest[1]
            if what in ("q", "k", "v"):
                heads = {"q": (0, HEADS), "k": (HEADS, KEY_HEADS), "v": (HEADS + KEY_HEADS, KEY_HEADS)}[what]
                first, rows = (count * HEAD_DIM // self.parts for count in heads)
                place = layer.qkv.data.narrow(0, first, rows)
                source = self.slice(tensor, 0)
                assert place.shape == source.shape
                place.copy_(source)
            elif what == "norm":
                layer.norm.data.copy_(tensor)
            elif what == "o":
                layer.o.data.copy_(self.slice(tensor, 1))
            elif what == "experts":
                self._load_expert(layer, int(rest[2]), rest[3], tensor)

    def _load_expert(self, layer: Layer, expert: int, what: str, tensor: Tensor) -> None:
        if what == "down":
            layer.w2.data[expert].copy_(self.slice(tensor, 1))
        else:
            half = FFN // self.parts
            layer.w13.data[expert].narrow(0, half * (what == "up"), half).copy_(self.slice(tensor, 0))


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape), requires_grad=False)


def weights(seed: int = 0, layers: int = 2, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    shapes = {"embed.weight": (VOCABULARY, HIDDEN)}
    for layer in range(layers):
        rows = {"q": HEADS * HEAD_DIM, "k": KEY_HEADS * HEAD_DIM, "v": KEY_HEADS * HEAD_DIM}
        shapes |= {f"layers.{layer}.{name}": (count, HIDDEN) for name, count in rows.items()}
        shapes |= {f"layers.{layer}.o": (HIDDEN, HEADS * HEAD_DIM), f"layers.{layer}.norm": (HIDDEN,)}
        for expert in range(EXPERTS):
            own = f"layers.{layer}.experts.{expert}"
            shapes |= {f"{own}.gate": (FFN, HIDDEN), f"{own}.up": (FFN, HIDDEN), f"{own}.down": (HIDDEN, FFN)}
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}
