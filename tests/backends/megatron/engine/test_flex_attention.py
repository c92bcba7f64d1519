"""Compiled attention with capped scores has the outputs and gradients of the one that is written out."""

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch.nn.attention import flex_attention as library

from dagrl.backends.megatron.engine import flex_attention
from dagrl.backends.megatron.engine.cpu.attention import PackedAttention
from dagrl.backends.megatron.engine.flex_attention import FlexAttention

HEADS, GROUPS, CHANNELS = 4, 2, 16


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Traces forward and backward as on a GPU, and runs the graph as it is: torch has no such kernel for CPUs."""
    monkeypatch.setattr(library, "_validate_device", lambda *tensors: None)
    # Megatron on a CPU turns compilation off.
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)
    with torch._dynamo.config.patch(disable=False):
        compiled = torch.compile(library.flex_attention, dynamic=True, backend="aot_eager")
        monkeypatch.setattr(flex_attention, "_flex_attention", lambda: compiled)
        yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("traced")
def test_packs_of_any_length_with_and_without_a_window() -> None:
    for lengths in ((5, 40, 1, 17), (150,)):
        for window in (None, (3, 0)):
            config = SimpleNamespace(
                context_parallel_size=1,
                tensor_model_parallel_size=1,
                attention_dropout=0.0,
                window_size=window,
                window_attn_skip_freq=None,
                softmax_scale=None,
                kv_channels=CHANNELS,
                num_attention_heads=HEADS,
                softmax_type="vanilla",
                attn_logit_softcapping=0.7,
            )
            results = []
            for kind in (FlexAttention, PackedAttention):
                bounds = torch.tensor([0, *lengths]).cumsum(0).int()
                pack = PackedSeqParams(qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds)
                generator = torch.Generator().manual_seed(1)
                tensors = [
                    torch.randn(sum(lengths), heads, CHANNELS, generator=generator).double().requires_grad_()
                    for heads in (HEADS, GROUPS, GROUPS)
                ]
                found = kind(config, 1, None, "self")(*tensors, packed_seq_params=pack)
                found.square().sum().backward()
                results.append([found, *(tensor.grad for tensor in tensors)])
            for ours, expected in zip(*results, strict=True):
                torch.testing.assert_close(ours, expected, rtol=1e-6, atol=1e-6)
