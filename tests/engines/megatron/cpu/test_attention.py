"""Packed attention is the attention of each sequence alone, whatever their lengths, at a bounded cost in padding."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dagrl.engines.megatron.cpu.attention import PackedAttention, _layout, _similar

HEADS, GROUPS, CHANNELS = 4, 2, 8
lengths_of_packs = st.lists(st.integers(0, 90), min_size=1, max_size=12).map(tuple).filter(any)


def attention(**fields) -> PackedAttention:
    config = {"context_parallel_size": 1, "window_size": None, "softmax_type": "vanilla", "attention_dropout": 0.0}
    config |= {"kv_channels": CHANNELS, **fields}
    return PackedAttention(SimpleNamespace(**config), 1, attn_mask_type=None, attention_type="self")


def packed(query, key, value, lengths) -> torch.Tensor:
    bounds = torch.tensor([0, *lengths]).cumsum(0).int()
    params = SimpleNamespace(cu_seqlens_q=bounds, cu_seqlens_q_padded=None)
    return attention()(query, key, value, packed_seq_params=params)


def one_by_one(query, key, value, lengths) -> torch.Tensor:
    """Softmax of scaled products below the diagonal, written out."""
    outputs = []
    for q, k, v in zip(query.split(lengths), key.split(lengths), value.split(lengths), strict=True):
        k, v = (tensor.repeat_interleave(HEADS // GROUPS, dim=1) for tensor in (k, v))
        scores = torch.einsum("qhc,khc->hqk", q, k) / CHANNELS**0.5
        hidden = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        outputs.append(torch.einsum("hqk,khc->qhc", weights, v).flatten(1))
    return torch.cat(outputs)


def inputs(tokens: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    shapes = [(tokens, heads, CHANNELS) for heads in (HEADS, GROUPS, GROUPS)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]


@settings(deadline=None, max_examples=40)
@given(lengths_of_packs)
def test_outputs_and_gradients_are_those_of_each_sequence_alone(lengths):
    ours, theirs = inputs(sum(lengths)), inputs(sum(lengths))
    found, expected = packed(*ours, lengths), one_by_one(*theirs, lengths)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    direction = torch.randn(expected.shape, dtype=torch.float64)
    found.backward(direction)
    expected.backward(direction)
    for our, their in zip(ours, theirs, strict=True):
        torch.testing.assert_close(our.grad, their.grad, rtol=1e-10, atol=1e-12)


@given(st.lists(st.integers(0, 4000), max_size=200).map(tuple))
def test_few_calls_and_little_padding(lengths):
    groups = _similar(lengths)
    assert sorted(index for group in groups for index in group) == [i for i, length in enumerate(lengths) if length]
    assert len(groups) <= 8, "halving from 4000 down to 32"
    for group in groups:
        longest, shortest = lengths[group[0]], lengths[group[-1]]
        assert longest == max(lengths[index] for index in group)
        assert longest <= 32 or 2 * shortest > longest


def test_all_layers_share_a_layout():
    assert _layout((5, 9)) is _layout((5, 9))


def test_padding_within_the_pack_belongs_to_its_sequence():
    query, key, value = inputs(10)
    real, padded = torch.tensor([0, 3, 9]).int(), torch.tensor([0, 4, 10]).int()
    params = SimpleNamespace(cu_seqlens_q=real, cu_seqlens_q_padded=padded)
    found = attention()(query, key, value, packed_seq_params=params)
    torch.testing.assert_close(found, one_by_one(query, key, value, (4, 6)), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("fields", [{"context_parallel_size": 2}, {"window_size": (8, 0)}])
def test_what_it_cannot_do_is_refused(fields):
    with pytest.raises(AssertionError, match="on the CPU"):
        attention(**fields)
