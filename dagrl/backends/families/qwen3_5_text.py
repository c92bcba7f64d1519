"""Qwen3.5 and Qwen3.6, the dense language models: gated delta nets in three of four layers."""

from __future__ import annotations

from dagrl.backends.families.gated_delta import GatedDeltaFamily


class Qwen35Text(GatedDeltaFamily):
    """Dense language models of Qwen3.5."""

    model_type = "qwen3_5_text"


FAMILY = Qwen35Text()
