"""Adam with Transformer Engine's state layout, in plain torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypedDict, cast

import torch
from torch.optim.optimizer import ParamsT


class _Group(TypedDict):
    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    step: int


class FusedAdam(torch.optim.Optimizer):
    """Adam (Kingma and Ba, 2015), or AdamW (Loshchilov and Hutter, 2019) with `adam_w_mode`.

    Its state has the layout of Transformer Engine's optimizer of this name, so that CPU and GPU can exchange
    checkpoints: steps are counted in the parameter group.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adam_w_mode: bool = True,
        capturable: bool = False,
    ) -> None:
        assert not capturable, "CUDA graphs need CUDA"
        defaults = {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay, "bias_correction": True}
        super().__init__(params, defaults)
        self._decoupled = adam_w_mode

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None, "megatron calls step without a closure"
        for group in self.param_groups:
            # A group whose parameters are all on other ranks must stay unchanged for the checkpoint format.
            if not group["params"]:
                continue
            group["step"] = int(group.get("step", 0)) + 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, cast("_Group", group))

    def _update(self, parameter: torch.Tensor, group: _Group) -> None:
        gradient, state = parameter.grad, self.state[parameter]
        assert gradient is not None
        if not state:
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        if self._decoupled:
            parameter.mul_(1 - group["lr"] * group["weight_decay"])
        else:
            gradient = gradient.add(parameter, alpha=group["weight_decay"])
        beta1, beta2 = group["betas"]
        mean = state["exp_avg"].lerp_(gradient, 1 - beta1)
        square = state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        mean_scale, square_scale = 1 - beta1 ** group["step"], 1 - beta2 ** group["step"]
        denominator = (square / square_scale).sqrt_().add_(group["eps"])
        parameter.addcdiv_(mean, denominator, value=-group["lr"] / mean_scale)
