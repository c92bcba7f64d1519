"""The kernels that are compiled ahead exist in SGLang, with these arguments."""

from __future__ import annotations

import inspect
from types import SimpleNamespace

import pytest
import torch

sglang = pytest.importorskip("sglang")

from dagrl.backends.sglang.kernels import all_reduce_kernels, fp8_kernels, kernels  # noqa: E402

QWEN3_8B = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "hidden_size": 4096}


def named(config, **options) -> dict[str, tuple]:
    options = {"ranks": 1, "dtype": torch.bfloat16, "cache_bytes": 2} | options
    return {kernel.func.__name__: kernel.args for kernel in kernels(config, **options)}


def test_arguments_fit():
    found = kernels(QWEN3_8B, ranks=1, dtype=torch.bfloat16, cache_bytes=2)
    for kernel in (*found, *all_reduce_kernels(2, torch.bfloat16), *fp8_kernels(torch.bfloat16)):
        inspect.signature(kernel.func).bind(*kernel.args, **kernel.keywords)


def test_sums_between_ranks_are_those_that_sglang_compiles(monkeypatch: pytest.MonkeyPatch):
    from sglang.kernels.ops.communication import all_reduce

    wanted = []
    monkeypatch.setattr(
        all_reduce,
        "load_jit",
        lambda *args, **options: wanted.append((args, options)) or SimpleNamespace(register_once=lambda: None),
    )
    all_reduce._init_communicator()
    all_reduce._init_ipc_manager()
    assert [(kernel.args, kernel.keywords) for kernel in all_reduce_kernels(2, torch.bfloat16)[1:]] == wanted


@pytest.mark.parametrize(
    ("ranks", "cache_bytes", "row_bytes"), [(1, 2, 2048), (2, 2, 1024), (16, 2, 256), (1, 1, 1024)]
)
def test_rows_of_the_cache_follow_the_layout(ranks: int, cache_bytes: int, row_bytes: int):
    found = named(QWEN3_8B, ranks=ranks, cache_bytes=cache_bytes)
    assert found["_jit_kvcache_module"] == (row_bytes, row_bytes)


def test_heads_are_derived_where_the_config_has_no_size():
    found = named({"num_attention_heads": 16, "hidden_size": 1024, "partial_rotary_factor": 0.5})
    assert found["_jit_kvcache_module"] == (2048, 2048)
    assert found["_jit_fused_rope_module"][1] == 32


def test_latent_attention_is_left_to_sglang():
    assert named(QWEN3_8B | {"kv_lora_rank": 512}) == {}
