"""Packed attention is the attention of each sequence alone, whatever their lengths, at a bounded cost in padding.

So it is on ranks that share the pack out.
"""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.packed_seq_params import PackedSeqParams

from dagrl.backends.megatron.engine.context_parallel import zigzag_index
from dagrl.backends.megatron.engine.cpu.attention import PackedAttention, _layout, _similar, window_of

HEADS, GROUPS, CHANNELS = 4, 2, 8
lengths_of_packs = st.lists(st.integers(0, 90), min_size=1, max_size=12).map(tuple).filter(any)


def attention(group=None, **fields) -> PackedAttention:
    config = {"context_parallel_size": 1, "tensor_model_parallel_size": 1, "attention_dropout": 0.0}
    config |= {"window_size": None, "window_attn_skip_freq": None, "softmax_scale": None, "softmax_type": "vanilla"}
    config |= {"kv_channels": CHANNELS, "num_attention_heads": HEADS, "params_dtype": torch.float64, **fields}
    groups = SimpleNamespace(cp=group) if group else None
    return PackedAttention(
        SimpleNamespace(**config), 1, attn_mask_type=None, attention_type="self", pg_collection=groups
    )


def packed(query, key, value, lengths) -> torch.Tensor:
    return attention()(query, key, value, packed_seq_params=pack_of(lengths))


def pack_of(lengths, key_lengths=None) -> PackedSeqParams:
    queries, keys = (torch.tensor([0, *each]).cumsum(0).int() for each in (lengths, key_lengths or lengths))
    return PackedSeqParams(qkv_format="thd", cu_seqlens_q=queries, cu_seqlens_kv=keys)


def one_by_one(query, key, value, lengths, *, window=None, cap=None, sinks=None) -> torch.Tensor:
    """Softmax of scaled products below the diagonal, written out; `sinks` take a share for no value."""
    outputs, lengths = [], tuple(map(int, lengths))
    for q, k, v in zip(query.split(lengths), key.split(lengths), value.split(lengths), strict=True):
        k, v = (tensor.repeat_interleave(HEADS // GROUPS, dim=1) for tensor in (k, v))
        scores = torch.einsum("qhc,khc->hqk", q, k) / CHANNELS**0.5
        if cap:
            scores = cap * torch.tanh(scores / cap)
        hidden = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
        if window is not None:
            hidden |= torch.ones(scores.shape[1:], dtype=torch.bool).tril(-window - 1)
        exponential = scores.masked_fill(hidden, -torch.inf).exp()
        total = exponential.sum(-1, keepdim=True)
        weights = exponential / (total if sinks is None else total + sinks.exp().view(-1, 1, 1))
        outputs.append(torch.einsum("hqk,khc->qhc", weights, v).flatten(1))
    return torch.cat(outputs)


def inputs(tokens: int, value_channels: int = CHANNELS) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    shapes = [(tokens, HEADS, CHANNELS), (tokens, GROUPS, CHANNELS), (tokens, GROUPS, value_channels)]
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
    assert _layout((5, 9), (5, 9), 0, 1) is _layout((5, 9), (5, 9), 0, 1)


def test_padding_within_the_pack_belongs_to_its_sequence():
    query, key, value = inputs(10)
    real, padded = torch.tensor([0, 3, 9]).int(), torch.tensor([0, 4, 10]).int()
    params = PackedSeqParams(
        cu_seqlens_q=real, cu_seqlens_kv=real, cu_seqlens_q_padded=padded, cu_seqlens_kv_padded=padded
    )
    found = attention()(query, key, value, packed_seq_params=params)
    torch.testing.assert_close(found, one_by_one(query, key, value, (4, 6)), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("window", [None, 0, 8, 100])
@pytest.mark.parametrize("cap", [None, 0.7])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_windows_caps_and_sinks(window, cap, with_sinks):
    lengths = (5, 40, 1, 0, 17)
    fields = {"window_size": None if window is None else (window, 0), "attn_logit_softcapping": cap}
    ours = attention(**fields, softmax_type="learnable" if with_sinks else "vanilla")
    sinks = torch.linspace(-1, 1, HEADS, dtype=torch.float64).requires_grad_() if with_sinks else None
    if with_sinks:
        ours.softmax_offset.data.copy_(sinks)
    given, other = inputs(sum(lengths)), inputs(sum(lengths))
    found = ours(*given, packed_seq_params=pack_of(lengths))
    expected = one_by_one(*other, lengths, window=window, cap=cap, sinks=sinks)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    found.square().sum().backward()
    expected.square().sum().backward()
    pairs = [*zip(given, other, strict=True), *([(ours.softmax_offset, sinks)] if with_sinks else [])]
    for our, their in pairs:
        torch.testing.assert_close(our.grad, their.grad, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("window", [None, 0, 8])
def test_queries_at_the_end_of_their_keys(window):
    """As the last queries of a sequence whose others are left out."""
    lengths, key_lengths = (2, 40, 1, 7, 17), (5, 40, 40, 8, 30)
    places = torch.arange(sum(key_lengths)).split(key_lengths)
    last = torch.cat([place[-length:] for place, length in zip(places, lengths, strict=True)])
    ours = attention(window_size=None if window is None else (window, 0))
    (query, *own), other = inputs(sum(key_lengths)), inputs(sum(key_lengths))
    found = ours(query[last], *own, packed_seq_params=pack_of(lengths, key_lengths))
    expected = one_by_one(*other, key_lengths, window=window)[last]
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    found.square().sum().backward()
    expected.square().sum().backward()
    for our, their in zip((query, *own), other, strict=True):
        torch.testing.assert_close(our.grad, their.grad, rtol=1e-9, atol=1e-12)


def test_layers_between_windows_attend_to_all():
    window = {"window_size": (3, 0), "window_attn_skip_freq": [1, 0]}
    config = SimpleNamespace(**window)
    assert [window_of(config, layer) for layer in (1, 2)] == [3, None]


@pytest.mark.parametrize("fields", [{"softmax_type": "off-by-one"}, {"window_size": (8, 8)}])
def test_unsupported_settings_are_refused(fields):
    with pytest.raises(AssertionError):
        attention(**fields)


def test_values_may_have_fewer_channels_than_keys():
    query, key, value = inputs(10, value_channels=3)
    found = packed(query, key, value, (4, 6))
    assert found.shape == (10, HEADS * 3)
    torch.testing.assert_close(found, one_by_one(query, key, value, (4, 6)), rtol=1e-10, atol=1e-12)


@pytest.mark.skipif(torch.cuda.is_available(), reason="megatron gathers on the GPU where there is one")
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("value_channels", [CHANNELS, 3])
def test_ranks_that_share_a_pack_get_its_outputs_and_gradients(run_ranks, size, value_channels):
    """One long sequence, many short ones, an empty one, and all lengths that differ."""
    chunks = [(1,), (30,), (1, 2, 1, 3), (9, 0, 1, 14, 5, 2, 2, 28), (3, 3, 3)]
    packs = [np.array(pack) * 2 * size for pack in chunks]

    def on_rank(rank: int) -> list[list[np.ndarray]]:
        shared = attention(torch.distributed.group.WORLD, context_parallel_size=size)
        results = []
        for lengths in packs:
            held = zigzag_index(lengths, rank, size)
            query, key, value = (
                whole.detach()[held].requires_grad_() for whole in inputs(int(lengths.sum()), value_channels)
            )
            output = shared(query, key, value, packed_seq_params=pack_of(lengths.tolist()))
            output.backward(direction(int(lengths.sum()), value_channels)[held])
            results.append([tensor.detach().numpy() for tensor in (output, query.grad, key.grad, value.grad)])
        return results

    for rank, results in enumerate(run_ranks(size, on_rank)):
        for lengths, found in zip(packs, results, strict=True):
            whole = inputs(int(lengths.sum()), value_channels)
            output = one_by_one(*whole, lengths)
            output.backward(direction(int(lengths.sum()), value_channels))
            held = zigzag_index(lengths, rank, size)
            for ours, theirs in zip(found, (output.detach(), *(tensor.grad for tensor in whole)), strict=True):
                np.testing.assert_allclose(ours, theirs[held].numpy(), rtol=1e-10, atol=1e-12)


def direction(tokens: int, value_channels: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(tokens)
    return torch.randn((tokens, HEADS * value_channels), generator=generator, dtype=torch.float64)
