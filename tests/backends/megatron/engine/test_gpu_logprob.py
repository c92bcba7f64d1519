"""The compiled kernels of log-probs equal plain torch in float64, on a GPU."""

from typing import Any

import pytest
import torch

from dagrl.backends.megatron.engine.logprob import linear_loss, linear_token_logprobs, token_logprobs
from dagrl.backends.megatron.engine.token_statistics import TokenScores, VocabColumns, linear_statistics

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.mark.parametrize("columns", [1003, 32768])
@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize("way", ["whole", "twice", "once"])
@pytest.mark.parametrize("candidates", [0, 16])
def test_values_and_gradients_are_those_of_log_softmax(
    columns: int, with_entropy: bool, way: str, candidates: int
) -> None:
    generator = torch.Generator("cuda").manual_seed(1)
    padded = columns + 21
    for tokens in (1, 37, 300):
        hidden = torch.randn(tokens, 64, generator=generator, device="cuda").bfloat16()
        weight = (0.3 * torch.randn(padded, 64, generator=generator, device="cuda")).bfloat16()
        targets = torch.randint(0, columns, (tokens,), generator=generator, device="cuda")
        up = torch.randn(2, tokens, generator=generator, device="cuda")
        ids = (
            torch.randint(0, columns, (tokens, candidates), generator=generator, device="cuda") if candidates else None
        )
        of_candidates = torch.randn(tokens, candidates, generator=generator, device="cuda")
        how = {"temperature": 0.7, "vocab_size": columns, "with_entropy": with_entropy, "chunk_elements": 100 * padded}
        logits = hidden @ weight.t()
        exact = logits.double().requires_grad_()
        log_p = torch.log_softmax(exact[:, :columns] / 0.7, dim=-1)
        expected = log_p.gather(1, targets[:, None]).squeeze(1)
        expected_entropy = -(log_p.exp() * log_p).sum(1)
        total = expected @ up[0].double()
        if ids is not None:
            expected_candidates = log_p.gather(1, ids)
            total = total + (expected_candidates * of_candidates).sum()
        (total + expected_entropy @ up[1].double() if with_entropy else total).backward()
        assert exact.grad is not None
        if way == "whole":
            given, slope = logits.requires_grad_(), exact.grad
            scores = token_logprobs(given, targets, VocabColumns(given.shape[1], **how), ids)
        elif way == "twice":
            given, slope = hidden.requires_grad_(), exact.grad @ weight.double()
            scores = linear_token_logprobs(
                given, weight.requires_grad_(), targets, VocabColumns(len(weight), **how), ids
            )
        else:
            given, slope = hidden.requires_grad_(), exact.grad @ weight.double()

            def slopes_of(part: slice, scores: TokenScores, up: Any = up, further: Any = of_candidates) -> TokenScores:
                of_entropy = None if scores.entropy is None else up[1, part]
                return TokenScores(up[0, part], of_entropy, None if scores.candidates is None else further[part])

            scores, carrier = linear_loss(
                given, weight.requires_grad_(), targets, VocabColumns(len(weight), **how), slopes_of, ids
            )
            carrier.backward()
        logprob, entropy, found = scores
        if way != "once":
            total = logprob @ up[0] if found is None else logprob @ up[0] + (found * of_candidates).sum()
            (total + entropy @ up[1] if entropy is not None else total).backward()
        if way != "whole":
            assert exact.grad is not None and weight.grad is not None
            of_weight = exact.grad.t() @ hidden.detach().double()
            assert (weight.grad.double() - of_weight).norm() / of_weight.norm() < 5e-3
        torch.testing.assert_close(logprob.double(), expected.detach(), rtol=1e-5, atol=1e-5)
        if found is not None:
            torch.testing.assert_close(found.double(), expected_candidates.detach(), rtol=1e-5, atol=1e-5)
        if entropy is not None:
            torch.testing.assert_close(entropy.double(), expected_entropy.detach(), rtol=1e-5, atol=1e-5)
        assert given.grad is not None
        error = (given.grad.double() - slope).norm() / slope.norm()
        assert error < 5e-3, f"{error:.1e}: more than rounding to bfloat16"


@pytest.mark.parametrize("columns", [1003, 32768])
@pytest.mark.parametrize("with_entropy", [False, True])
def test_likeliest_tokens_and_squares_are_those_of_softmax(columns: int, with_entropy: bool) -> None:
    generator = torch.Generator("cuda").manual_seed(2)
    hidden = torch.randn(300, 64, generator=generator, device="cuda").bfloat16()
    weight = (0.3 * torch.randn(columns + 21, 64, generator=generator, device="cuda")).bfloat16()
    targets = torch.randint(0, columns, (300,), generator=generator, device="cuda")
    how = {"with_entropy": with_entropy, "chunk_elements": 100 * (columns + 21)}
    found = linear_statistics(
        hidden, weight, targets, VocabColumns(len(weight), columns, 0.7, with_square_sum=True, top_k=16, **how)
    )
    log_p = torch.log_softmax((hidden @ weight.t()).double()[:, :columns] / 0.7, dim=-1)
    assert found.square_sum is not None and found.top_ids is not None and found.top_logprob is not None
    torch.testing.assert_close(found.square_sum.double(), log_p.exp().square().sum(1), rtol=1e-4, atol=1e-6)
    # Ids of equal logits in bfloat16 may be in any order.
    torch.testing.assert_close(found.top_logprob.double(), log_p.topk(16, dim=1).values, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.top_logprob.double(), log_p.gather(1, found.top_ids), rtol=1e-5, atol=1e-5)
