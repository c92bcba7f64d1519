"""Parameters of SGLang's models that no trainer sends, or that an update cannot write."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dagrl.backends.sglang.fp8 import load_weights, restore_cache_scales, sent_parameters


class Attention(torch.nn.Module):
    """Attention with the scales of an fp8 cache, as SGLang sets them when it has loaded a model."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("weight", "k_scale", "v_scale"):
            self.register_parameter(name, torch.nn.Parameter(torch.ones(()), requires_grad=False))
        for scale in (self.k_scale, self.v_scale):
            scale._skip_weight_check = True
        self.k_scale_float, self.v_scale_float = 0.5, 0.25
        self.loaded: Any = None

    def load_weights(self, weights: Any) -> None:
        self.loaded = weights


def test_scales_of_the_cache_are_set_by_the_server() -> None:
    model = torch.nn.Sequential(Attention(), torch.nn.Linear(1, 1, bias=False))
    plain: Any = model[1]
    plain.k_scale = plain.v_scale = plain.k_scale_float = plain.v_scale_float = None
    assert list(sent_parameters(model)) == ["0.weight", "1.weight"]
    restore_cache_scales(model)
    assert (float(model[0].k_scale), float(model[0].v_scale)) == (0.5, 0.25)


def test_packed_scales_are_not_overwritten() -> None:
    model = Attention()
    load_weights(model, ["all"])
    assert model.loaded == ["all"]
    model.weight.format_ue8m0 = True
    with pytest.raises(ValueError, match="pack the scales of fp8, such as weight"):
        load_weights(model, [])
