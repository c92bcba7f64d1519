"""Sums over a small trace."""

import pytest

TRACE = [
    {"cat": "cpu_op", "name": "aten::mm", "ts": 0.0, "dur": 9000.0},
    {"cat": "kernel", "name": "void gemm<float, 4>(float*)", "ts": 100.0, "dur": 1000.0},
    {"cat": "kernel", "name": "void gemm<half, 8>(half*)", "ts": 600.0, "dur": 1000.0},
    {"cat": "gpu_memcpy", "name": "Memcpy DtoH", "ts": 2100.0, "dur": 400.0},
    {"name": "process_name", "ph": "M"},
]


@pytest.fixture(scope="module")
def profile(benchmark_module):
    return benchmark_module("decode_profile")


def test_kernels_that_overlap_are_busy_once_and_each_counts_whole(profile) -> None:
    found = profile.kernel_times(TRACE, 2)
    assert found["kernels"] == pytest.approx({"gemm": 1.0, "Memcpy DtoH": 0.2})
    assert found["busy_ms"] == pytest.approx((1.5 + 0.4) / 2)
    assert found["step_ms"] == pytest.approx((2.5 - 0.1) / 2)


def test_without_a_gpu_operators_count(profile) -> None:
    assert profile.kernel_times(TRACE[:1], 1)["kernels"] == pytest.approx({"aten::mm": 9.0})
