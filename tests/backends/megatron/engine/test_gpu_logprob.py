"""The compiled kernels of log-probs equal plain torch in float64, on a GPU."""

from typing import Any

import pytest
import torch

from dagrl.backends.megatron.engine.linear_loss import linear_loss
from dagrl.backends.megatron.engine.logprob import VocabColumns, linear_token_logprobs, token_logprobs

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.mark.parametrize("columns", [1003, 32768])
@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize("way", ["whole", "twice", "once"])
def test_values_and_gradients_are_those_of_log_softmax(columns: int, with_entropy: bool, way: str) -> None:
    generator = torch.Generator("cuda").manual_seed(1)
    padded = columns + 21
    for tokens in (1, 37, 300):
        hidden = torch.randn(tokens, 64, generator=generator, device="cuda").bfloat16()
        weight = (0.3 * torch.randn(padded, 64, generator=generator, device="cuda")).bfloat16()
        targets = torch.randint(0, columns, (tokens,), generator=generator, device="cuda")
        up = torch.randn(2, tokens, generator=generator, device="cuda")
        how = {"temperature": 0.7, "vocab_size": columns, "with_entropy": with_entropy, "chunk_elements": 100 * padded}
        logits = hidden @ weight.t()
        exact = logits.double().requires_grad_()
        log_p = torch.log_softmax(exact[:, :columns] / 0.7, dim=-1)
        expected = log_p.gather(1, targets[:, None]).squeeze(1)
        expected_entropy = -(log_p.exp() * log_p).sum(1)
        total = expected @ up[0].double()
        (total + expected_entropy @ up[1].double() if with_entropy else total).backward()
        assert exact.grad is not None
        if way == "whole":
            given, slope = logits.requires_grad_(), exact.grad
            logprob, entropy = token_logprobs(given, targets, VocabColumns(given.shape[1], **how))
        elif way == "twice":
            given, slope = hidden.requires_grad_(), exact.grad @ weight.double()
            logprob, entropy = linear_token_logprobs(
                given, weight.requires_grad_(), targets, VocabColumns(len(weight), **how)
            )
        else:
            given, slope = hidden.requires_grad_(), exact.grad @ weight.double()

            def slopes_of(part: slice, *outputs: torch.Tensor | None, up: torch.Tensor = up) -> Any:
                return up[0, part], None if outputs[1] is None else up[1, part]

            logprob, entropy, carrier = linear_loss(
                given, weight.requires_grad_(), targets, VocabColumns(len(weight), **how), slopes_of
            )
            carrier.backward()
        if way != "once":
            (logprob @ up[0] + entropy @ up[1] if entropy is not None else logprob @ up[0]).backward()
        if way != "whole":
            assert exact.grad is not None and weight.grad is not None
            of_weight = exact.grad.t() @ hidden.detach().double()
            assert (weight.grad.double() - of_weight).norm() / of_weight.norm() < 5e-3
        torch.testing.assert_close(logprob.double(), expected.detach(), rtol=1e-5, atol=1e-5)
        if entropy is not None:
            torch.testing.assert_close(entropy.double(), expected_entropy.detach(), rtol=1e-5, atol=1e-5)
        assert given.grad is not None
        error = (given.grad.double() - slope).norm() / slope.norm()
        assert error < 5e-3, f"{error:.1e}: more than rounding to bfloat16"
