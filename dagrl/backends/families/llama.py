"""Llama (https://arxiv.org/abs/2407.21783): the dense model that `base.Family` describes."""

from __future__ import annotations

from dagrl.backends.families.base import Family


class Llama(Family):
    """Llama 2, 3 and 3.1, and models of the same architecture."""

    model_type = "llama"
    required = {"attention_bias": (False,), "mlp_bias": (False,)}
    heads_divide_hidden = True


FAMILY = Llama()
