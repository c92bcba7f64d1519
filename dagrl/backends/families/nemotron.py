"""Nemotron (https://arxiv.org/abs/2406.11704): squared ReLU without a gate, and layer norms."""

from __future__ import annotations

from dataclasses import replace

from dagrl.backends.families.base import Family
from dagrl.backends.families.config_fields import ConfigFields
from dagrl.backends.families.parts import Attention, GatedMlp
from dagrl.backends.families.shape import ModelShape


class Nemotron(Family):
    """Nemotron-3 8B, Nemotron-4, Minitron and models of the same architecture."""

    model_type = "nemotron"
    bridged = True
    zero_centred_norms = True
    activations = ("relu2",)
    rope_kinds = ("default",)
    rotates_parts = True
    required = {"attention_bias": (False,), "mlp_bias": (False,)}

    def attention(self, config: ConfigFields) -> Attention:
        return self.grouped_query_attention(config, norm_bias=True)

    def mlp(self, config: ConfigFields) -> GatedMlp:
        sizes = config.size("hidden_size"), config.size("intermediate_size")
        return GatedMlp(*sizes, gated=False, norm_bias=True)

    def shape(self, config: ConfigFields) -> ModelShape:
        return replace(super().shape(config), norm_bias=True)


FAMILY = Nemotron()
