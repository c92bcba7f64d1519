"""Memory of SGLang's servers: its own rules, computed by hand."""

from __future__ import annotations

from typing import Any

import pytest
from published_shapes import DEEPSEEK_V3, QWEN3_1B7, QWEN3_8B, QWEN3_30B

from dagrl.backends.families.shape import ModelShape
from dagrl.backends.planning.gpus import gpu_named
from dagrl.backends.planning.memory import CONTEXT, GIB, EngineMemory
from dagrl.backends.planning.planned_engine import Workload
from dagrl.backends.sglang.memory import (
    cache_bytes_per_token,
    cache_tokens,
    fraction_of,
    server_memory,
)
from dagrl.backends.sglang.section import SglangEngineSpec

H200, H100, A100 = gpu_named("H200"), gpu_named("H100"), gpu_named("A100-40GB")


def engine(**server: Any) -> SglangEngineSpec:
    return SglangEngineSpec(backend="sglang", group="gpu", weights_from="actor", server=server)


def memory(shape: ModelShape = QWEN3_8B, *, sleeps: bool = False, gpu: Any = H200, **server: Any) -> EngineMemory:
    return server_memory(shape, engine(**server), gpu, Workload(longest=4096, bucket_bytes=2**28, sleeps=sleeps))


def test_weights_are_split_and_nothing_else_is_whole() -> None:
    # Two bytes for each of 8.19 billion; rows of the vocabulary are a multiple of 64 already.
    assert memory().awake["weights"] == 2 * QWEN3_8B.parameters
    assert memory(QWEN3_1B7).awake["weights"] == 2 * QWEN3_1B7.parameters
    assert memory(tp_size=4).awake["weights"] == pytest.approx(QWEN3_8B.parameters / 2, rel=0.001)
    assert memory(dtype="float32").awake["weights"] == 4 * QWEN3_8B.parameters
    # Stages hold half of the layers, and the embedding or the output layer.
    assert memory(pp_size=2).awake["weights"] == pytest.approx(QWEN3_8B.parameters, rel=0.001)
    assert memory(QWEN3_30B, tp_size=4, ep_size=4).awake["weights"] == pytest.approx(QWEN3_30B.parameters / 2, rel=0.01)
    # With more ranks than key heads each has one: 4 more heads of 128 for keys and for values, shared by 8 ranks. Norms
    # and the router are whole on every rank, however many there are.
    four, eight = memory(QWEN3_30B, tp_size=4).awake["weights"], memory(QWEN3_30B, tp_size=8).awake["weights"]
    heads, whole = 2 * 4 * 128 * 2048 // 8, 2 * 2048 + 2 * 128 + 128 * 2048
    assert eight - four / 2 == 2 * 48 * (heads + whole / 2) + 2048


def test_linear_layers_in_fp8_have_half_the_bytes() -> None:
    for shape in (QWEN3_8B, QWEN3_30B):
        quantised = SglangEngineSpec(backend="sglang", group="rollout", weights_from="actor", quantization="fp8")
        weights = server_memory(shape, quantised, H200, Workload(longest=4096)).awake["weights"]
        assert weights == 2 * shape.parameters - shape.matrices
    assert QWEN3_8B.matrices == 36 * (4096 * (32 + 8 + 8) * 128 + 32 * 128 * 4096 + 3 * 4096 * 12288)


@pytest.mark.parametrize(
    ("shape", "server", "expected"),
    [
        # Keys and values of 8 heads of 128 in 36 layers, bfloat16.
        (QWEN3_8B, {}, 2 * 8 * 128 * 36 * 2),
        (QWEN3_8B, {"tp_size": 4}, 2 * 2 * 128 * 36 * 2),
        (QWEN3_8B, {"tp_size": 16}, 2 * 1 * 128 * 36 * 2),
        (QWEN3_8B, {"pp_size": 2}, 2 * 8 * 128 * 18 * 2),
        (QWEN3_8B, {"kv_cache_dtype": "fp8_e4m3"}, 2 * 8 * 128 * 36),
        (QWEN3_8B, {"tp_size": 4, "dp_size": 4, "enable_dp_attention": True}, 2 * 8 * 128 * 36 * 2),
        # 512 compressed values and 64 with positions, the same on every rank.
        (DEEPSEEK_V3, {"tp_size": 8}, (512 + 64) * 61 * 2),
    ],
)
def test_the_cache_of_a_token(shape: ModelShape, server: dict[str, Any], expected: int) -> None:
    assert cache_bytes_per_token(shape, engine(**server)) == expected


@pytest.mark.parametrize(
    ("gpu", "server", "sleeps", "fraction"),
    [
        (H200, {"mem_fraction_static": 0.35}, True, 0.35),
        (H200, {}, True, 0.8),
        # SGLang's reserve in MiB: 512 + 8192 x 1.5 + 512 x 2 + 1024 / 8 = 13952, of 143155.
        (H200, {}, False, 0.903),
        # 512 + 8192 x 1.5 + 256 x 2 + 2 x 1024 / 8 = 13568, of 80998.
        (H100, {"tp_size": 2, "cuda_graph_max_bs_decode": 256}, False, 0.832),
        # 512 + 4096 x 1.5 + 0 + 128 = 6784, of 40448.
        (A100, {"disable_cuda_graph": True}, False, 0.832),
        # 512 + 2048 x 1.5 + 1024 + 128 is less than the 10 GiB that large GPUs keep.
        (H200, {"chunked_prefill_size": 2048}, False, 0.928),
    ],
)
def test_the_share_that_a_server_may_fill(gpu: Any, server: dict[str, Any], sleeps: bool, fraction: float) -> None:
    assert fraction_of(engine(**server), gpu, sleeps=sleeps) == fraction


def test_cache_fills_what_weights_leave_of_the_share() -> None:
    found = memory(mem_fraction_static=0.5)
    free = H200.memory_bytes - CONTEXT
    assert found.awake["weights"] + found.awake["cache"] == pytest.approx(free / 2, rel=1e-6)
    assert cache_tokens(QWEN3_8B, engine(mem_fraction_static=0.5), found) == found.awake["cache"] // 147456
    bounded = memory(max_total_tokens=100_000)
    assert bounded.awake["cache"] == 100_000 * 147456
    assert found.needs is not None and bounded.needs == found.needs < found.peak


def test_a_model_that_does_not_fit_the_share_needs_more_than_there_is() -> None:
    found = memory(DEEPSEEK_V3, tp_size=8)
    assert found.awake["cache"] == 0
    assert found.needs is not None and found.needs > H200.memory_bytes


def test_a_sleeper_leaves_all_but_its_process() -> None:
    asleep = memory(sleeps=True)
    # 1.7B on one GPU of an H200 kept 1.1 to 1.5 GiB, on two 2.2; at work they have more.
    assert asleep.asleep == pytest.approx(1.5 * GIB, rel=0.01)
    assert memory(sleeps=True, tp_size=2).asleep == pytest.approx(2.2 * GIB, rel=0.1)
    assert asleep.asleep < asleep.awake["runtime"] < 4 * GIB
    assert asleep.asleep < asleep.weights_alone < asleep.peak
    assert asleep.host == 0, "its weights come anew"
    alone = SglangEngineSpec(backend="sglang", group="gpu", server={})
    assert (
        server_memory(QWEN3_8B, alone, H200, Workload(longest=4096, sleeps=True, keeps_weights=True)).host
        == 2 * QWEN3_8B.parameters
    )
    # One that has its GPUs to itself keeps the room for two buckets.
    assert (asleep.awake["buffers"], memory().awake["buffers"]) == (0, 2**29)


def test_the_default_memory_fraction_is_reported() -> None:
    assert memory().notes == ("mem_fraction_static is 0.903, as it is not given",)
    assert memory(mem_fraction_static=0.5).notes == ()


def test_a_server_on_the_host_has_the_cache_that_bounds_it() -> None:
    found = server_memory(QWEN3_1B7, engine(), None, Workload(longest=4096))
    assert found.awake == {"weights": 4 * QWEN3_1B7.parameters, "cache": 16384 * 2 * 8 * 128 * 28 * 4}
    assert found.asleep == 0
