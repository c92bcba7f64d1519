"""The gradient of the output layer in its forward pass is that of plain logits."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from dagrl.backends.megatron.engine.logprob import linear_loss, linear_token_logprobs, token_logprobs
from dagrl.backends.megatron.engine.teacher_divergence import Teacher
from dagrl.backends.megatron.engine.token_statistics import TokenScores, VocabColumns
from dagrl.config.schema.nodes.distillation import WholeDivergence

Given = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def given_tokens(tokens: int, vocab_size: int, padding: int, seed: int = 0) -> Given:
    """Hidden states, weights, targets, and two factors of each token's loss."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, 5, generator=generator, dtype=torch.float64)
    weight = torch.randn(vocab_size + padding, 5, generator=generator, dtype=torch.float64)
    targets = torch.randint(0, vocab_size, (tokens,), generator=generator)
    return hidden, weight, targets, torch.randn(2, tokens, generator=generator, dtype=torch.float64)


def given_candidates(tokens: int, vocab_size: int, count: int, seed: int = 0) -> torch.Tensor | None:
    """Ids of any tokens, several of which may be equal, and -1 for some of them."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-1, vocab_size, (tokens, count), generator=generator) if count else None


KINDS = {
    "forward": WholeDivergence(0.0, False, "states"),
    "mixed": WholeDivergence(0.3, False, "states"),
    "reverse": WholeDivergence(1.0, False, "states"),
    "jsd": WholeDivergence(0.3, True, "states"),
}


def given_teacher(
    tokens: int, rows: int, kind: str | None, seed: int = 0
) -> tuple[torch.Tensor, WholeDivergence] | None:
    """A teacher's logits and its divergence."""
    generator = torch.Generator().manual_seed(seed + 1)
    return (torch.randn(tokens, rows, generator=generator, dtype=torch.float64), KINDS[kind]) if kind else None


def teacher_of(given: tuple[torch.Tensor, WholeDivergence] | None, columns: slice = slice(None)) -> Teacher | None:
    return Teacher(given[0][:, columns].__getitem__, given[1]) if given else None


def loss_of(scores: TokenScores, factors: torch.Tensor) -> torch.Tensor:
    """Something curved, so that slopes depend on the values."""
    loss = factors[0] @ scores.logprob.exp() + factors[1] @ scores.logprob.square()
    if scores.candidates is not None:
        known = torch.where(scores.candidates.isinf(), 0.0, scores.candidates)
        weight = torch.linspace(-1, 1, known.shape[1], dtype=known.dtype)
        loss = loss + (factors[0] * (known.square() @ weight)).sum()
    if scores.divergence is not None:
        loss = loss + (factors[0] * scores.divergence.square()).sum() + factors[1] @ scores.divergence
    return loss if scores.entropy is None else loss + 0.5 * (factors[1] * scores.entropy).square().sum()


def in_one_pass(
    inputs: list[torch.Tensor],
    targets: torch.Tensor,
    factors: torch.Tensor,
    candidates: torch.Tensor | None = None,
    teacher: Teacher | None = None,
    **how: Any,
) -> Any:
    """Scores, and the scalar that has the gradient of `loss_of`."""

    def slopes_of(part: slice, scores: TokenScores) -> TokenScores:
        asked = scores.map(lambda each: each.detach().requires_grad_())
        with torch.enable_grad():
            slopes = iter(torch.autograd.grad(loss_of(asked, factors[:, part]), [x for x in asked if x is not None]))
        return TokenScores(*(None if each is None else next(slopes) for each in asked))

    return linear_loss(*inputs, targets, VocabColumns(len(inputs[1]), **how), slopes_of, candidates, teacher)


@settings(deadline=None)
@given(
    tokens=st.integers(0, 9),
    vocab_size=st.integers(2, 12),
    padding=st.integers(0, 3),
    chunk_elements=st.integers(1, 60),
    temperature=st.floats(0.4, 2),
    with_entropy=st.booleans(),
    count=st.integers(0, 5),
    kind=st.sampled_from([None, *KINDS]),
    by_token=st.booleans(),
    scale=st.floats(-3, 3),
    seed=st.integers(0, 99),
)
def test_values_and_gradients_are_those_of_plain_logits(
    tokens, vocab_size, padding, chunk_elements, temperature, with_entropy, count, kind, by_token, scale, seed
) -> None:
    *given, targets, factors = given_tokens(tokens, vocab_size, padding, seed)
    weight = given[1]
    heat = temperature * torch.linspace(1, 2, tokens, dtype=torch.float64) if by_token else temperature
    how = {"temperature": heat, "vocab_size": vocab_size, "with_entropy": with_entropy}
    ids = given_candidates(tokens, vocab_size, 0 if kind else count, seed)
    teaching = given_teacher(tokens, vocab_size + padding, kind, seed)
    once, twice, whole = ([each.clone().requires_grad_() for each in given] for _ in range(3))
    scores, carrier = in_one_pass(
        once, targets, factors, ids, teacher_of(teaching), chunk_elements=chunk_elements, **how
    )
    (scale * carrier).backward()
    columns = VocabColumns(len(weight), chunk_elements=chunk_elements, **how)
    again = linear_token_logprobs(*twice, targets, columns, ids, teacher_of(teaching))
    (scale * loss_of(again, factors)).backward()
    logits = whole[0] @ whole[1].t()
    ready = token_logprobs(logits, targets, columns, ids, teacher_of(teaching))
    (scale * loss_of(ready, factors)).backward()
    plain = [each.clone().requires_grad_() for each in given]
    expected = plain_scores(plain[0] @ plain[1].t(), targets, ids, vocab_size, heat, with_entropy, teaching)
    (scale * loss_of(expected, factors)).backward()
    assert carrier.item() == 0 and not scores.logprob.requires_grad
    for found in (scores, again, ready):
        for one, other in zip(found, expected, strict=True):
            assert (one is None) == (other is None)
            if one is not None:
                torch.testing.assert_close(one.detach(), other.detach(), rtol=1e-12, atol=1e-12)
    for inputs in (once, twice, whole):
        for found, exact in zip(inputs, plain, strict=True):
            torch.testing.assert_close(found.grad, exact.grad, rtol=1e-10, atol=1e-10)


def plain_scores(
    logits: torch.Tensor,
    targets: torch.Tensor,
    ids: torch.Tensor | None,
    vocab_size: int,
    heat: Any,
    with_entropy: bool,
    teaching: tuple[torch.Tensor, WholeDivergence] | None = None,
) -> TokenScores:
    """By autograd through the whole distribution."""
    divisor = heat[:, None] if isinstance(heat, torch.Tensor) else heat
    log_p = torch.log_softmax(logits[:, :vocab_size] / divisor, dim=-1)
    chosen = None if ids is None else torch.where(ids < 0, -torch.inf, log_p.gather(1, ids.clamp(min=0)))
    entropy = -(log_p.exp() * log_p).sum(1) if with_entropy else None
    divergence = None
    if teaching is not None:
        log_q, kind = torch.log_softmax(teaching[0][:, :vocab_size] / divisor, dim=-1), teaching[1]
        p, q, alpha = log_p.exp(), log_q.exp(), kind.alpha
        if kind.is_mixture:
            m = ((1 - alpha) * p + alpha * q).log()
            divergence = (alpha * q * (log_q - m) + (1 - alpha) * p * (log_p - m)).sum(1)
        else:
            divergence = ((1 - alpha) * q * (log_q - log_p) + alpha * p * (log_p - log_q)).sum(1)
    return TokenScores(log_p.gather(1, targets[:, None]).squeeze(1), entropy, chosen, divergence)


@pytest.mark.parametrize("kind", [None, "mixed", "jsd"])
def test_a_vocabulary_split_over_ranks_gives_the_same_as_a_whole_one(run_ranks, kind: str | None) -> None:
    hidden, weight, targets, factors = given_tokens(7, 9, 3)
    ids, teaching = given_candidates(7, 9, 0 if kind else 4), given_teacher(7, 12, kind)
    how: dict[str, Any] = {"temperature": 0.8, "vocab_size": 9, "with_entropy": True}

    def on_rank(rank: int) -> list[torch.Tensor]:
        how["group"] = torch.distributed.group.WORLD
        own = [each.clone().requires_grad_() for each in (hidden, weight.chunk(4)[rank])]
        teacher = teacher_of(teaching, slice(3 * rank, 3 * rank + 3))
        scores, carrier = in_one_pass(own, targets, factors, ids, teacher, chunk_elements=6, **how)
        carrier.backward()
        again = [each.clone().requires_grad_() for each in (hidden, weight.chunk(4)[rank])]
        columns = VocabColumns(3, chunk_elements=6, **how)
        loss_of(token_logprobs(again[0] @ again[1].t(), targets, columns, ids, teacher), factors).backward()
        return [*(score for score in scores if score is not None), *(each.grad for each in (*own, *again))]

    whole = [each.clone().requires_grad_() for each in (hidden, weight)]
    expected = plain_scores(whole[0] @ whole[1].t(), targets, ids, 9, 0.8, True, teaching)
    loss_of(expected, factors).backward()
    # The last rank's three columns are all padding.
    ranks = run_ranks(4, on_rank)
    for found in ranks:
        for one, other in zip(found[:3], (score for score in expected if score is not None), strict=True):
            torch.testing.assert_close(one, other.detach(), rtol=1e-12, atol=1e-12)
    for first in (3, 5):
        torch.testing.assert_close(sum(rank[first] for rank in ranks), whole[0].grad, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(
            torch.cat([rank[first + 1] for rank in ranks]), whole[1].grad, rtol=1e-10, atol=1e-10
        )


@pytest.mark.parametrize("count", [0, 5])
def test_half_precision_is_that_of_the_recomputing_path(count: int) -> None:
    *given, targets, factors = given_tokens(7, 12, 0)
    ids = given_candidates(7, 12, count)
    ours, theirs = ([each.bfloat16().requires_grad_() for each in given] for _ in range(2))
    how = {"temperature": 1.0, "vocab_size": 12, "chunk_elements": 24}
    scores, carrier = in_one_pass(ours, targets, factors.float(), ids, **how)
    expected = linear_token_logprobs(*theirs, targets, VocabColumns(len(theirs[1]), **how), ids)
    carrier.backward()
    loss_of(expected, factors.float()).backward()
    assert scores.logprob.dtype == torch.float32 and torch.equal(scores.logprob, expected.logprob.detach())
    for found, plain in zip(ours, theirs, strict=True):
        assert found.grad is not None and found.grad.dtype == torch.bfloat16
        torch.testing.assert_close(found.grad, plain.grad, rtol=0.02, atol=0.02)


def test_a_student_like_its_teacher_has_the_exact_small_gradient_in_half_precision() -> None:
    """Both parts of a candidate's gradient are near 1, and their difference is below the rounding of either."""
    logits = torch.tensor([[3.0, 1.0, 0.5, -1.0]]).bfloat16()
    ids, exact = torch.arange(4)[None], logits.double().requires_grad_()
    teacher = torch.softmax(logits.double() + torch.tensor([[1e-3, 0, 0, 0]]), dim=-1)
    (-(teacher * torch.log_softmax(exact, dim=-1)).sum()).backward()
    logits.requires_grad_()
    scores = token_logprobs(logits, torch.tensor([0]), VocabColumns(4, 4, 1.0), ids)
    assert scores.candidates is not None and exact.grad is not None and logits.grad is None
    (-(teacher.float() * scores.candidates).sum()).backward()
    torch.testing.assert_close(logits.grad, exact.grad.bfloat16(), rtol=0.01, atol=0)


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
        in_one_pass(inputs, targets, factors, given_candidates(7, 12, 3), **how)[1].backward()
    logits = [shape[0] for shape in made if shape[1] == 12]
    assert max(logits) == rows and sum(logits) == 7
    # A frozen output layer, below low-rank adapters, has no gradient.
    assert sum(shape == (12, 5) for shape in made) == (0 if frozen else len(logits))
