import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from dagrl.backends.megatron.engine.logprob import linear_token_logprobs, token_logprobs
from dagrl.backends.megatron.engine.token_statistics import Statistics, VocabColumns, statistics


def plain(logits: torch.Tensor, targets: torch.Tensor, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    log_p = torch.log_softmax(logits / temperature, dim=-1)
    return log_p.gather(1, targets[:, None]).squeeze(1), -(log_p.exp() * log_p).sum(-1)


@pytest.fixture
def sample() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(7, 12, generator=generator, dtype=torch.float64)
    return logits, torch.randint(0, 12, (7,), generator=generator)


def test_two_equally_likely_tokens_have_log_half_and_entropy_log_two() -> None:
    logits = torch.tensor([[5.0, 5.0]])
    logprob, entropy, *_ = token_logprobs(
        logits, torch.tensor([1]), VocabColumns(logits.shape[1], temperature=0.7, vocab_size=2, with_entropy=True)
    )
    assert logprob.tolist() == pytest.approx([-math.log(2)])
    assert entropy is not None and entropy.tolist() == pytest.approx([math.log(2)])


@pytest.mark.parametrize("chunk_elements", [1, 30, 10**6])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_values_and_gradients_are_those_of_log_softmax(sample, temperature: float, chunk_elements: int) -> None:
    logits, targets = sample
    up_logprob, up_entropy = torch.randn(2, 7, dtype=torch.float64)
    ours, theirs = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    logprob, entropy, *_ = token_logprobs(
        ours,
        targets,
        VocabColumns(
            ours.shape[1], temperature=temperature, vocab_size=12, with_entropy=True, chunk_elements=chunk_elements
        ),
    )
    expected_logprob, expected_entropy = plain(theirs, targets, temperature)
    assert entropy is not None
    torch.testing.assert_close(logprob, expected_logprob, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(entropy, expected_entropy, rtol=1e-12, atol=1e-12)
    (logprob @ up_logprob + entropy @ up_entropy).backward()
    (expected_logprob @ up_logprob + expected_entropy @ up_entropy).backward()
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-12, atol=1e-12)


def test_each_token_may_have_a_temperature_of_its_own(sample) -> None:
    logits, targets = sample
    how = {"width": 12, "vocab_size": 12, "with_entropy": True, "chunk_elements": 30}
    temperature = torch.linspace(0.5, 1.7, 7, dtype=torch.float64)
    ours, single = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    logprob, entropy, *_ = token_logprobs(ours, targets, VocabColumns(temperature=temperature, **how))
    assert entropy is not None
    total = torch.zeros((), dtype=torch.float64)
    for row in range(7):
        here = slice(row, row + 1)
        one, spread, *_ = token_logprobs(
            single[here], targets[here], VocabColumns(temperature=float(temperature[row]), **how)
        )
        assert spread is not None
        assert (logprob[row], entropy[row]) == (one[0], spread[0])
        total = total + one[0] - 0.3 * spread[0]
    (logprob - 0.3 * entropy).sum().backward()
    total.backward()
    torch.testing.assert_close(ours.grad, single.grad, rtol=0, atol=0)


def test_gradients_hold_against_finite_differences(sample) -> None:
    logits, targets = sample
    assert torch.autograd.gradcheck(
        lambda x: token_logprobs(
            x, targets, VocabColumns(x.shape[1], temperature=0.8, vocab_size=12, with_entropy=True)
        )[:2],
        logits.requires_grad_(),
    )


def test_padding_columns_have_no_probability_and_no_gradient(sample) -> None:
    logits, targets = sample
    targets = targets % 9
    padded = logits.clone()
    padded[:, 9:] = 100.0
    padded.requires_grad_()
    logprob, *_ = token_logprobs(padded, targets, VocabColumns(padded.shape[1], temperature=1.0, vocab_size=9))
    torch.testing.assert_close(logprob, plain(logits[:, :9], targets, 1.0)[0], rtol=1e-12, atol=1e-12)
    logprob.sum().backward()
    assert padded.grad is not None and padded.grad[:, 9:].abs().max() == 0 and padded.grad[:, :9].abs().max() > 0


def test_half_precision_logits_are_worked_on_in_float32(sample) -> None:
    logits, targets = sample
    half = logits.to(torch.bfloat16).requires_grad_()
    logprob, *_ = token_logprobs(half, targets, VocabColumns(half.shape[1], temperature=1.0, vocab_size=12))
    assert logprob.dtype == torch.float32
    exact = plain(half.detach().double(), targets, 1.0)[0]
    torch.testing.assert_close(logprob.double(), exact, rtol=1e-6, atol=1e-6)
    logprob.sum().backward()
    assert half.grad is not None and half.grad.dtype == torch.bfloat16


def test_entropy_is_left_out_unless_asked_for(sample) -> None:
    logits, targets = sample
    assert (
        token_logprobs(logits, targets, VocabColumns(logits.shape[1], temperature=1.0, vocab_size=12)).entropy is None
    )


def test_no_tokens_give_an_empty_result_with_a_gradient_of_zero(sample) -> None:
    logits = sample[0][:0].clone().requires_grad_()
    logprob, entropy, *_ = token_logprobs(
        logits, sample[1][:0], VocabColumns(logits.shape[1], temperature=1.0, vocab_size=12, with_entropy=True)
    )
    assert entropy is not None and logprob.shape == entropy.shape == (0,)
    (logprob.sum() + entropy.sum()).backward()
    assert logits.grad is not None and logits.grad.shape == (0, 12)


def test_a_vocabulary_split_over_ranks_gives_the_same_as_a_whole_one(sample, run_ranks) -> None:
    logits, targets = sample
    targets = targets % 9

    def on_rank(rank: int) -> tuple[torch.Tensor, ...]:
        own = logits.chunk(4, dim=1)[rank].clone().requires_grad_()
        logprob, entropy, *_ = token_logprobs(
            own,
            targets,
            VocabColumns(
                own.shape[1],
                temperature=0.8,
                vocab_size=9,
                group=torch.distributed.group.WORLD,
                with_entropy=True,
                chunk_elements=5,
            ),
        )
        (logprob.sum() + 0.5 * entropy.square().sum()).backward()
        return logprob.detach(), entropy.detach(), own.grad

    # Of the 12 columns, the last rank's three are all padding.
    whole = logits[:, :9].clone().requires_grad_()
    logprob, entropy = plain(whole, targets, 0.8)
    (logprob.sum() + 0.5 * entropy.square().sum()).backward()
    ranks = run_ranks(4, on_rank)
    for found_logprob, found_entropy, _ in ranks:
        torch.testing.assert_close(found_logprob, logprob.detach(), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(found_entropy, entropy.detach(), rtol=1e-12, atol=1e-12)
    found = torch.cat([grad for _, _, grad in ranks], dim=1)
    torch.testing.assert_close(found[:, :9], whole.grad, rtol=1e-12, atol=1e-12)
    assert found[:, 9:].abs().max() == 0


@pytest.mark.parametrize("chunk_elements", [1, 30, 10**6])
def test_logits_made_chunk_by_chunk_give_the_same_values_and_gradients(sample, chunk_elements: int) -> None:
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(7, 5, generator=generator, dtype=torch.float64)
    weight = torch.randn(12, 5, generator=generator, dtype=torch.float64)
    targets = sample[1] % 10
    how = {"temperature": 0.8, "vocab_size": 10, "with_entropy": True}
    results = []
    for fused in (True, False):
        inputs = [tensor.clone().requires_grad_() for tensor in (hidden, weight)]
        if fused:
            logprob, entropy, *_ = linear_token_logprobs(
                *inputs, targets, VocabColumns(len(inputs[1]), chunk_elements=chunk_elements, **how)
            )
        else:
            logprob, entropy, *_ = token_logprobs(
                inputs[0] @ inputs[1].t(), targets, VocabColumns(len(inputs[1]), **how)
            )
        (logprob.sum() + 0.5 * entropy.square().sum()).backward()
        results.append([logprob.detach(), entropy.detach(), *(tensor.grad for tensor in inputs)])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("chunk_elements", "rows"), [(30, 5), (12, 2), (1, 1), (10**6, 7)])
def test_no_more_logits_are_made_at_once_than_asked_for(chunk_elements: int, rows: int) -> None:
    class Products(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            if func is torch.ops.aten.mm.default:
                made.append(tuple(result.shape))
            return result

    made: list[tuple[int, ...]] = []
    hidden, weight = torch.randn(7, 3, requires_grad=True), torch.randn(12, 3)
    with Products():
        how = {"temperature": 1.0, "vocab_size": 12, "chunk_elements": chunk_elements}
        logprob, *_ = linear_token_logprobs(hidden, weight, torch.arange(7), VocabColumns(len(weight), **how))
        logprob.sum().backward()
    logits = [shape[0] for shape in made if shape[1] == 12]
    assert max(logits) == rows and sum(logits) == 2 * 7, "all rows, forward and backward"


def test_very_unlike_ranks_are_joined_without_overflow(run_ranks) -> None:
    logits = torch.tensor([[1e4, -1e4, 3.0, 2.0], [-1e4, -1e4, 1e4, 9.9e3]], dtype=torch.float32)

    def on_rank(rank: int) -> tuple[torch.Tensor, ...]:
        return token_logprobs(
            logits.chunk(2, dim=1)[rank],
            torch.tensor([0, 3]),
            VocabColumns(2, temperature=1.0, vocab_size=4, group=torch.distributed.group.WORLD, with_entropy=True),
        )[:2]

    for logprob, entropy in run_ranks(2, on_rank):
        assert logprob.tolist() == [0.0, -100.0]
        assert entropy.tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    ("width", "at_once", "sizes"),
    [(151936, 5, [4096, 4096, 1808]), (151936, 1, [512] * 19 + [272]), (2**27, 1, [1] * 10_000), (0, 1, [10_000])],
)
def test_chunks_of_more_than_a_tile_have_a_power_of_two_of_rows(width: int, at_once: int, sizes: list[int]) -> None:
    columns = VocabColumns(width, width, 1.0)
    parts = list(columns.chunks(10_000, at_once=at_once))
    assert [part.stop - part.start for part in parts] == sizes
    assert [part.start for part in parts[1:]] == [part.stop for part in parts[:-1]]


@settings(deadline=None)
@given(
    tokens=st.integers(0, 9),
    vocab_size=st.integers(1, 12),
    padding=st.integers(0, 3),
    top_k=st.integers(1, 14),
    chunk_elements=st.integers(1, 60),
    with_entropy=st.booleans(),
    by_token=st.booleans(),
    seed=st.integers(0, 99),
)
def test_likeliest_tokens_and_squares_are_those_of_softmax(
    tokens, vocab_size, padding, top_k, chunk_elements, with_entropy, by_token, seed
) -> None:
    logits = 3 * torch.randn(tokens, vocab_size + padding, generator=torch.Generator().manual_seed(seed)).double()
    heat = torch.linspace(0.5, 1.7, tokens, dtype=torch.float64) if by_token else 0.8
    how = {"with_entropy": with_entropy, "chunk_elements": chunk_elements}
    columns = VocabColumns(logits.shape[1], vocab_size, heat, with_square_sum=True, top_k=top_k, **how)
    found = statistics(logits.__getitem__, logits, torch.zeros(tokens, dtype=torch.int64), columns)
    assert_likeliest(found, logits[:, :vocab_size] / (heat[:, None] if by_token else heat), top_k)


def assert_likeliest(found: Statistics, x: torch.Tensor, top_k: int) -> None:
    """Those of softmax(x): all of them, if `top_k` is that large."""
    log_p = torch.log_softmax(x, dim=-1)
    assert found.square_sum is not None and found.top_logprob is not None and found.top_ids is not None
    torch.testing.assert_close(found.square_sum, log_p.exp().square().sum(1), rtol=1e-12, atol=1e-12)
    known = min(top_k, x.shape[1])
    expected, ids = log_p.topk(known, dim=1)
    torch.testing.assert_close(found.top_logprob[:, :known], expected, rtol=1e-12, atol=1e-12)
    assert torch.equal(found.top_ids[:, :known], ids)
    assert found.top_ids.shape == found.top_logprob.shape == (len(x), top_k)
    assert (found.top_ids[:, known:] == -1).all() and found.top_logprob[:, known:].isneginf().all()


@pytest.mark.parametrize("top_k", [1, 4, 9, 15])
def test_likeliest_tokens_of_a_split_vocabulary_are_those_of_the_whole_one(sample, run_ranks, top_k: int) -> None:
    logits, targets = sample

    def on_rank(rank: int) -> Statistics:
        # Of the 12 columns, the last rank's three are all padding.
        own, group = logits.chunk(4, dim=1)[rank], torch.distributed.group.WORLD
        how = {"with_entropy": True, "with_square_sum": True, "chunk_elements": 5, "group": group}
        columns = VocabColumns(3, 9, 0.8, top_k=top_k, **how)
        return statistics(own.__getitem__, own, targets % 9, columns)

    for found in run_ranks(4, on_rank):
        assert_likeliest(found, logits[:, :9] / 0.8, top_k)
