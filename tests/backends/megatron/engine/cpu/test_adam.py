"""The optimizer steps as torch's does, and keeps its state as Transformer Engine's does."""

import pytest
import torch

from dagrl.backends.megatron.engine.cpu.adam import FusedAdam

OPTIONS = {"lr": 3e-2, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}


def after_steps(optimizer_class: type, **options) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    parameters = [
        torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in (5, (3, 2))
    ]
    optimizer = optimizer_class(parameters, **OPTIONS, **options)
    for _ in range(7):
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        optimizer.step()
    return [parameter.detach() for parameter in parameters]


@pytest.mark.parametrize(("decoupled", "reference"), [(True, torch.optim.AdamW), (False, torch.optim.Adam)])
def test_steps_are_those_of_torch(decoupled, reference):
    for ours, theirs in zip(after_steps(FusedAdam, adam_w_mode=decoupled), after_steps(reference), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)


def test_the_state_has_moments_alone_and_groups_count_the_steps():
    weight = torch.ones(2, requires_grad=True)
    optimizer = FusedAdam([{"params": [weight]}, {"params": []}])
    weight.grad = torch.ones(2)
    optimizer.step()
    assert optimizer.state[weight].keys() == {"exp_avg", "exp_avg_sq"}
    assert [group.get("step") for group in optimizer.param_groups] == [1, None]


def test_a_parameter_without_a_gradient_stays():
    weight = torch.ones(2, requires_grad=True)
    FusedAdam([weight], **OPTIONS).step()
    assert weight.tolist() == [1.0, 1.0]
