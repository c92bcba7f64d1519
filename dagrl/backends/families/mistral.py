"""Mistral (https://arxiv.org/abs/2310.06825): Llama's layers, with a window that attention slides along."""

from __future__ import annotations

from dagrl.backends.families.base import Family


class Mistral(Family):
    """Mistral 7B and models of the same architecture."""

    model_type = "mistral"
    bridged = True
    rope_kinds = ("default",)


FAMILY = Mistral()
