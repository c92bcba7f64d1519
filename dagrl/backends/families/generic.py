"""Models that megatron-bridge builds and no module here describes, by the usual names of their sizes.

Their plans omit small parameters, such as biases and further norms.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from dagrl.backends.families.base import Family, mixture_after_dense_layers
from dagrl.backends.families.config_fields import ConfigFields, HfConfig, is_size
from dagrl.backends.families.parts import MIXTURE_DEFAULTS, Attention, GatedExperts

TESTED = frozenset({"gemma", "minimax_m2", "deepseek_v2", "exaone_moe", "glm4_moe_lite", "olmoe"})
"""Types whose log-probs and weights were compared with Hugging Face's."""
_FAULTY: dict[str, str] = {
    "ernie4_5_moe": "its log-probs differ from Hugging Face's",
    "hy_v3": "megatron-bridge does not read its config",
    "qwen3_5_moe": "megatron-bridge builds its language model alone (qwen3_5_moe_text)",
    "gemma4_text": "megatron-bridge has no names for some of its weights",
    **dict.fromkeys(("deepseek_v4", "glm_moe_dsa"), "sparse attention does not take packed sequences"),
}
"""Types that do not run, or not exactly -> the reason."""


class Generic(Family):
    """A decoder with grouped-query or latent attention, gated MLPs and experts."""

    bridged = True
    has_tables = False
    expert_count: ClassVar[tuple[str, ...]] = ()

    def __init__(self, model_type: str, expert_count: tuple[str, ...], expert_width: str) -> None:
        """`expert_count` is empty for dense models."""
        self.model_type = model_type  # type: ignore[misc]
        self.expert_width = expert_width  # type: ignore[misc]
        self.expert_count = expert_count  # type: ignore[misc]
        self.transformer_defaults = MIXTURE_DEFAULTS if expert_count else {}  # type: ignore[misc]

    def attention(self, config: ConfigFields) -> Attention:
        if not is_size(config.get("kv_lora_rank")):
            return self.grouped_query_attention(config)
        return self.latent_attention(config)

    def experts(self, config: ConfigFields) -> GatedExperts | None:
        if not self.expert_count:
            return None
        width = config.optional(self.expert_width) or config.size("intermediate_size")
        shared = (config.optional("n_shared_experts") or 0) * width
        return GatedExperts(
            hidden=config.size("hidden_size"),
            count=config.size(*self.expert_count),
            chosen=config.size("num_experts_per_tok"),
            width=width,
            shared_width=config.optional("shared_expert_intermediate_size") or shared,
        )

    def mixture_layers(self, config: ConfigFields) -> tuple[bool, ...]:
        return mixture_after_dense_layers(config)

    def sizes_left_out(self, config: HfConfig) -> list[str]:
        # Of a refused type the reason counts.
        return [] if self.model_type in _FAULTY else super().sizes_left_out(config)

    def unsupported(self, config: ConfigFields) -> Iterator[tuple[str, str]]:
        if self.model_type in _FAULTY:
            yield "model_type", f"the megatron engine does not train {self.model_type}: {_FAULTY[self.model_type]}"

    def warnings(self, config: ConfigFields) -> Iterator[tuple[str, str]]:
        if self.model_type not in TESTED:
            message = "is built by megatron-bridge and was not tested with dagrl; compare its first log-probs"
            yield "model_type", f"{self.model_type} {message} (metrics mismatch/*)"
