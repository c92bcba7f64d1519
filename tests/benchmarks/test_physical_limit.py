"""The physical limit of a step, by figures that a reader can check on paper."""

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from dagrl.backends.families.registry import model_shape
from dagrl.backends.families.shape import ModelShape
from dagrl.config.schema import ModelSpec


@pytest.fixture(scope="module")
def physical(benchmark_module) -> Any:
    return benchmark_module("physical_limit")


@pytest.fixture(scope="module")
def h200(physical) -> Any:
    return physical.Rates(matmul=800e12, fp8_matmul=1600e12, reads=4.8e12, value_bytes=2)


@pytest.fixture(scope="module")
def load(physical) -> Any:
    return physical.Load(prompts=128, n=4, prompt_tokens=256, response_tokens=512)


@pytest.fixture(scope="module")
def shape_of(benchmark_module) -> Callable[[str], ModelShape]:
    models = benchmark_module("workload").MODELS

    def shape(name: str) -> ModelShape:
        fields = {key: value for key, value in models[name].items() if key != "architectures"}
        return model_shape(ModelSpec.model_validate({"init": fields, "tokenizer": {"kind": "bytes"}}))

    return shape


def test_stages_of_1_7b(physical, shape_of, load, h200) -> None:
    """1.41 billion weights in layers and 0.31 in the output layer; a token's cache is 114,688 bytes."""
    limits = physical.stage_limits(shape_of("1.7b"), load, h200)
    # 0.33 PFLOP for 2 x 1.41 billion x 393,216 tokens, and attention and output layer.
    assert limits["old"] == pytest.approx(1.63, rel=0.01)
    assert limits["update"] == 3 * limits["old"]
    decoding = 512 * (2 * 1.72e9 + 512 * 512 * 114_688) / 4.8e12
    assert limits["rollout"] == pytest.approx(decoding + 0.12, rel=0.02)


def test_products_are_the_limit_where_reads_cost_nothing(physical, shape_of, load, h200) -> None:
    limits = physical.stage_limits(shape_of("1.7b"), load, replace(h200, reads=1e30))
    # Each sampled token is multiplied once, and each prompt once for its group.
    assert 0.65 < limits["rollout"] / limits["old"] < 0.85


def test_a_mixture_reads_all_experts_and_multiplies_few(physical, shape_of, load, h200) -> None:
    shape = shape_of("a3b_6_layers")
    one = replace(load, prompts=1, n=1, response_tokens=1)
    read = physical.stage_limits(shape, one, replace(h200, matmul=1e30))["rollout"]
    assert read == pytest.approx((shape.matrices + shape.embedding) * 2 / 4.8e12, rel=0.01)
    assert physical.stage_limits(shape, load, h200)["old"] < load.samples * 768 * 2 * shape.matrices / 800e12 / 3


def test_fp8_lowers_what_it_is_used_for(physical, shape_of, load, h200) -> None:
    plain = physical.stage_limits(shape_of("8b"), load, h200)
    for rollout, cache, training in product((False, True), repeat=3):
        limits = physical.stage_limits(shape_of("8b"), load, h200, physical.Formats(rollout, cache, training))
        assert (limits["rollout"] < plain["rollout"]) == (rollout or cache)
        assert (limits["update"] < plain["update"]) == training
        assert limits["update"] > plain["update"] / 2


def test_rates_of_this_machine(physical) -> None:
    rates = physical.measured_rates()
    assert 1e9 < rates.matmul < 1e13 and 1e8 < rates.reads < 1e12
