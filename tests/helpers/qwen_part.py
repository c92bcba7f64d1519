"""A rank's part of a Qwen3 or Qwen3-MoE as SGLang holds it, without anything that computes; and tensors to fill it."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

_SIZES: dict[str, dict[str, Any]] = {
    "tiny": {
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "vocab_size": 1024,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "tie_word_embeddings": False,
    },
    "1.7b": {
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 28,
        "vocab_size": 151936,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "tie_word_embeddings": True,
    },
    "8b": {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "vocab_size": 151936,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "tie_word_embeddings": False,
    },
}
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "norm_topk_prob": True}


def fields(size: str) -> dict[str, Any]:
    """Hugging Face's config, for ``model.init``. ``tiny_moe`` is ``tiny`` with experts."""
    base = _SIZES[size.removesuffix("_moe")]
    return {"model_type": "qwen3_moe", **base, **_EXPERTS} if size.endswith("_moe") else {"model_type": "qwen3", **base}


class QwenPart(nn.Module):
    """What rank `rank` of `parts` ranks holds; experts are shared out whole, the rest is sliced."""

    def __init__(self, size: str, rank: int, parts: int, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.config = config = fields(size)
        self.rank, self.parts = rank, parts
        hidden, queries = config["hidden_size"], config["num_attention_heads"] * config["head_dim"]
        keys = config["num_key_value_heads"] * config["head_dim"]
        self._shapes: dict[str, tuple[int, ...]] = {"embed": (config["vocab_size"] // parts, hidden), "norm": (hidden,)}
        if not config["tie_word_embeddings"]:
            self._shapes["lm_head"] = (config["vocab_size"] // parts, hidden)
        self._rows = {"q_proj": queries // parts, "k_proj": keys // parts, "v_proj": keys // parts}
        for layer in range(config["num_hidden_layers"]):
            own = {
                "input_layernorm": (hidden,),
                "post_attention_layernorm": (hidden,),
                "q_norm": (config["head_dim"],),
                "k_norm": (config["head_dim"],),
                "qkv": (sum(self._rows.values()), hidden),
                "o_proj": (hidden, queries // parts),
            }
            if "num_experts" in config:
                experts, ffn = config["num_experts"] // parts, config["moe_intermediate_size"]
                own |= {"gate": (config["num_experts"], hidden), "w2": (experts, hidden, ffn)}
                own |= {"w13": (experts, 2 * ffn, hidden)}
            else:
                ffn = config["intermediate_size"] // parts
                own |= {"gate_up": (2 * ffn, hidden), "down_proj": (hidden, ffn)}
            self._shapes |= {f"{layer}-{name}": shape for name, shape in own.items()}
        for name, shape in self._shapes.items():
            empty = torch.empty(shape, device=device, dtype=dtype)
            self.register_parameter(name, nn.Parameter(empty, requires_grad=False))

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        held = dict(self.named_parameters())
        for name, tensor in weights:
            parts = name.removeprefix("model.").removesuffix(".weight").split(".")
            if parts[0] == "layers":
                self._load_layer(held, parts[1], parts[2:], tensor)
            elif parts == ["norm"]:
                held["norm"].data.copy_(tensor)
            else:
                held[{"embed_tokens": "embed"}.get(parts[0], parts[0])].data.copy_(self._slice(tensor, 0))

    def _load_layer(self, held: dict[str, nn.Parameter], layer: str, path: list[str], tensor: Tensor) -> None:
        what = path[-1]
        if what in self._rows:
            first = {"q_proj": 0, "k_proj": self._rows["q_proj"]}.get(what, sum(list(self._rows.values())[:2]))
            held[f"{layer}-qkv"].data.narrow(0, first, self._rows[what]).copy_(self._slice(tensor, 0))
        elif "experts" in path:
            self._load_expert(held, layer, int(path[-2]), what, tensor)
        elif what in ("gate_proj", "up_proj"):
            half = len(held[f"{layer}-gate_up"]) // 2
            place = held[f"{layer}-gate_up"].data.narrow(0, half * (what == "up_proj"), half)
            place.copy_(self._slice(tensor, 0))
        elif what in ("o_proj", "down_proj"):
            held[f"{layer}-{what}"].data.copy_(self._slice(tensor, 1))
        else:
            held[f"{layer}-{what}"].data.copy_(tensor)

    def _load_expert(self, held: dict[str, nn.Parameter], layer: str, expert: int, what: str, tensor: Tensor) -> None:
        each = self.config["num_experts"] // self.parts
        if expert // each != self.rank:
            return
        if what == "down_proj":
            held[f"{layer}-w2"].data[expert % each].copy_(tensor)
        else:
            half = self.config["moe_intermediate_size"]
            held[f"{layer}-w13"].data[expert % each].narrow(0, half * (what == "up_proj"), half).copy_(tensor)

    def _slice(self, tensor: Tensor, dim: int) -> Tensor:
        length = tensor.shape[dim] // self.parts
        return tensor.narrow(dim, self.rank * length, length)


def full_tensors(size: str, device: torch.device, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """All weights by Hugging Face's names, random."""
    from dagrl.backends.runtime.initial_weights import published_shapes
    from dagrl.config.schema import ModelSpec
    from dagrl.model_files.library_model import load_hf_config

    spec = ModelSpec.model_validate({"init": fields(size), "tokenizer": {"kind": "characters", "alphabet": "ab"}})
    for name, shape in published_shapes(load_hf_config(spec)).items():
        yield name, torch.randn(shape, device=device, dtype=dtype)
