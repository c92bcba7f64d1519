"""The gradient of the output layer in its forward pass is that of plain logits."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from dagrl.backends.megatron.engine.linear_loss import linear_loss
from dagrl.backends.megatron.engine.logprob import VocabColumns, linear_token_logprobs, token_logprobs

Given = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def given_tokens(tokens: int, vocab_size: int, padding: int, seed: int = 0) -> Given:
    """Hidden states, weights, targets, and two factors of each token's loss."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, 5, generator=generator, dtype=torch.float64)
    weight = torch.randn(vocab_size + padding, 5, generator=generator, dtype=torch.float64)
    targets = torch.randint(0, vocab_size, (tokens,), generator=generator)
    return hidden, weight, targets, torch.randn(2, tokens, generator=generator, dtype=torch.float64)


def loss_of(logprob: torch.Tensor, entropy: torch.Tensor | None, factors: torch.Tensor) -> torch.Tensor:
    """Something curved, so that slopes depend on the values."""
    loss = factors[0] @ logprob.exp() + factors[1] @ logprob.square()
    return loss if entropy is None else loss + 0.5 * (factors[1] * entropy).square().sum()


def in_one_pass(inputs: list[torch.Tensor], targets: torch.Tensor, factors: torch.Tensor, **how: Any) -> Any:
    """Log-probs, entropies, and the scalar that has the gradient of `loss_of`."""

    def slopes_of(part: slice, logprob: torch.Tensor, entropy: torch.Tensor | None) -> Any:
        outputs = [each.detach().requires_grad_() for each in (logprob, entropy) if each is not None]
        with torch.enable_grad():
            loss = loss_of(outputs[0], outputs[1] if len(outputs) == 2 else None, factors[:, part])
            slopes = torch.autograd.grad(loss, outputs)
        return slopes if len(slopes) == 2 else (*slopes, None)

    return linear_loss(*inputs, targets, VocabColumns(len(inputs[1]), **how), slopes_of)


@settings(deadline=None)
@given(
    tokens=st.integers(0, 9),
    vocab_size=st.integers(2, 12),
    padding=st.integers(0, 3),
    chunk_elements=st.integers(1, 60),
    temperature=st.floats(0.4, 2),
    with_entropy=st.booleans(),
    by_token=st.booleans(),
    scale=st.floats(-3, 3),
    seed=st.integers(0, 99),
)
def test_values_and_gradients_are_those_of_plain_logits(
    tokens, vocab_size, padding, chunk_elements, temperature, with_entropy, by_token, scale, seed
) -> None:
    *given, targets, factors = given_tokens(tokens, vocab_size, padding, seed)
    heat = temperature * torch.linspace(1, 2, tokens, dtype=torch.float64) if by_token else temperature
    how = {"temperature": heat, "vocab_size": vocab_size, "with_entropy": with_entropy}
    ours, theirs = ([each.clone().requires_grad_() for each in given] for _ in range(2))
    logprob, entropy, carrier = in_one_pass(ours, targets, factors, chunk_elements=chunk_elements, **how)
    (scale * carrier).backward()
    expected, expected_entropy = token_logprobs(theirs[0] @ theirs[1].t(), targets, VocabColumns(len(theirs[1]), **how))
    (scale * loss_of(expected, expected_entropy, factors)).backward()
    assert carrier.item() == 0 and not logprob.requires_grad
    torch.testing.assert_close(logprob, expected.detach(), rtol=1e-12, atol=1e-12)
    assert (entropy is None) == (expected_entropy is None)
    if entropy is not None:
        torch.testing.assert_close(entropy, expected_entropy.detach(), rtol=1e-12, atol=1e-12)
    for found, plain in zip(ours, theirs, strict=True):
        torch.testing.assert_close(found.grad, plain.grad, rtol=1e-10, atol=1e-10)


def test_a_vocabulary_split_over_ranks_gives_the_same_as_a_whole_one(run_ranks) -> None:
    hidden, weight, targets, factors = given_tokens(7, 9, 3)
    how: dict[str, Any] = {"temperature": 0.8, "vocab_size": 9, "with_entropy": True}

    def on_rank(rank: int) -> tuple[torch.Tensor, ...]:
        own = [each.clone().requires_grad_() for each in (hidden, weight.chunk(4)[rank])]
        how["group"] = torch.distributed.group.WORLD
        logprob, entropy, carrier = in_one_pass(own, targets, factors, chunk_elements=6, **how)
        carrier.backward()
        return logprob, entropy, *(each.grad for each in own)

    whole = [each.clone().requires_grad_() for each in (hidden, weight)]
    logprob, entropy = token_logprobs(whole[0] @ whole[1].t(), targets, VocabColumns(len(whole[1]), **how))
    loss_of(logprob, entropy, factors).backward()
    # The last rank's three columns are all padding.
    ranks = run_ranks(4, on_rank)
    for found, found_entropy, *_ in ranks:
        torch.testing.assert_close(found, logprob.detach(), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(found_entropy, entropy.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(sum(rank[2] for rank in ranks), whole[0].grad, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(torch.cat([rank[3] for rank in ranks]), whole[1].grad, rtol=1e-10, atol=1e-10)


def test_half_precision_is_that_of_the_recomputing_path() -> None:
    *given, targets, factors = given_tokens(7, 12, 0)
    ours, theirs = ([each.bfloat16().requires_grad_() for each in given] for _ in range(2))
    how = {"temperature": 1.0, "vocab_size": 12, "chunk_elements": 24}
    logprob, _, carrier = in_one_pass(ours, targets, factors.float(), **how)
    expected, _ = linear_token_logprobs(*theirs, targets, VocabColumns(len(theirs[1]), **how))
    carrier.backward()
    loss_of(expected, None, factors.float()).backward()
    assert logprob.dtype == torch.float32 and torch.equal(logprob, expected.detach())
    for found, plain in zip(ours, theirs, strict=True):
        assert found.grad is not None and found.grad.dtype == torch.bfloat16
        torch.testing.assert_close(found.grad, plain.grad, rtol=0.02, atol=0.02)


@pytest.mark.parametrize(("chunk_elements", "rows"), [(12, 5), (1, 1), (10**6, 7)])
@pytest.mark.parametrize("frozen", [False, True])
def test_logits_are_computed_once_and_in_chunks(chunk_elements: int, rows: int, frozen: bool) -> None:
    class Products(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            if func in (torch.ops.aten.mm.default, torch.ops.aten.mm.out, torch.ops.aten.addmm_.default):
                made.append(tuple(result.shape))
            return result

    made: list[tuple[int, ...]] = []
    hidden, weight, targets, factors = given_tokens(7, 12, 0)
    inputs = [hidden.requires_grad_(), weight.requires_grad_(not frozen)]
    how = {"temperature": 1.0, "vocab_size": 12, "chunk_elements": chunk_elements}
    with Products():
        in_one_pass(inputs, targets, factors, **how)[2].backward()
    logits = [shape[0] for shape in made if shape[1] == 12]
    assert max(logits) == rows and sum(logits) == 7
    # A frozen output layer, below low-rank adapters, has no gradient.
    assert sum(shape == (12, 5) for shape in made) == (0 if frozen else len(logits))
