"""Weights in fp8: the error of what has one scale, transformers' bits, and a trainer's buckets in that format."""

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dagrl.config.fp8_weights import BLOCK, Fp8Weights, Granularity, scaled_part
from dagrl.weight_sync.exporter import IteratedExporter, exported
from dagrl.weight_sync.fp8 import FP8, Fp8Exporter, quantise

_BLOCKS = (2 * BLOCK, 3 * BLOCK)
_EACH: tuple[Granularity, ...] = ("block", "channel")


def drawn(shape: tuple[int, ...], seed: int, exponent: int) -> Tensor:
    """Weights in bfloat16 whose rows differ in size."""
    generator = torch.Generator().manual_seed(seed)
    spread = torch.randint(-3, 4, (*shape[:-1], 1), generator=generator)
    return (torch.randn(shape, generator=generator) * 2.0 ** (exponent + spread)).bfloat16()


@torch.no_grad()
def dequantise(values: Tensor, scales: Tensor, granularity: Granularity) -> Tensor:
    """Return the weights, [..., rows, columns], that values and scales of `quantise` stand for."""
    rows, columns = values.shape[-2:]
    height, width = scaled_part(granularity, values.shape)
    wide = scales.repeat_interleave(height, -2)[..., :rows, :].repeat_interleave(width, -1)[..., :columns]
    return values.float() * wide


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(_EACH), st.integers(1, 300), st.integers(1, 300), st.integers(0, 9), st.integers(-40, 30))
def test_each_value_keeps_its_first_bits(
    granularity: Granularity, rows: int, columns: int, seed: int, exponent: int
) -> None:
    weights = drawn((rows, columns), seed, exponent)
    values, scales = quantise(weights, granularity)
    assert values.dtype == FP8 and values.shape == weights.shape
    assert scales.shape == Fp8Weights(granularity).scale_shape((rows, columns))
    error = (dequantise(values, scales, granularity) - weights.float()).abs()
    height, width = scaled_part(granularity, weights.shape)
    for row in range(0, rows, height):
        for column in range(0, columns, width):
            part = slice(row, row + height), slice(column, column + width)
            own, peak = weights[part].float().abs(), weights[part].float().abs().max()
            # e4m3 rounds to 3 bits after the leading one, and below 2**-6 to multiples of 2**-9; 448 is the peak.
            bound = torch.maximum(own / 16, peak / 448 / 1024) * (1 + 1e-5)
            assert (error[part] <= bound).all()
            assert values[part].float().abs().max() == (448 if peak > 0 else 0)


@settings(max_examples=20, deadline=None)
@given(st.sampled_from(_EACH), st.integers(1, 300), st.integers(1, 300), st.integers(0, 9))
def test_quantising_again_changes_nothing(granularity: Granularity, rows: int, columns: int, seed: int) -> None:
    once = quantise(drawn((rows, columns), seed, 0), granularity)
    again = quantise(dequantise(*once, granularity), granularity)
    assert torch.equal(once[0].view(torch.uint8), again[0].view(torch.uint8))
    torch.testing.assert_close(once[1], again[1], rtol=3e-7, atol=0)


def test_blocks_of_zeros_and_of_very_small_values() -> None:
    weights = torch.zeros(_BLOCKS)
    weights[:BLOCK, :BLOCK] = 1e-38
    weights[BLOCK:, BLOCK : 2 * BLOCK] = 3.0
    values, scales = quantise(weights, "block")
    assert scales[0, 1] == 1 and torch.isfinite(scales).all()
    restored = dequantise(values, scales, "block")
    assert (restored[:BLOCK] == 0).all()
    torch.testing.assert_close(restored[BLOCK:, BLOCK : 2 * BLOCK], torch.full((BLOCK, BLOCK), 3.0))


def test_rows_of_zeros_and_of_very_small_values() -> None:
    weights = torch.tensor([[0.0, 0.0], [1e-38, 0.0], [3.0, -1.5]])
    values, scales = quantise(weights, "channel")
    assert scales[0] == 1 and torch.isfinite(scales).all()
    restored = dequantise(values, scales, "channel")
    assert (restored[:2] == 0).all()
    torch.testing.assert_close(restored[2], weights[2])


@pytest.mark.parametrize("granularity", _EACH)
def test_a_value_that_is_not_finite_stays_visible(granularity: Granularity) -> None:
    weights = torch.ones(_BLOCKS)
    weights[0, 0], weights[BLOCK, BLOCK] = float("nan"), float("inf")
    finite = torch.isfinite(dequantise(*quantise(weights, granularity), granularity))
    assert not finite[0, 0] and not finite[BLOCK, BLOCK] and finite[1, 2 * BLOCK]


@pytest.mark.parametrize("shape", [_BLOCKS, (3, *_BLOCKS)])
def test_bits_are_those_of_transformers(shape: tuple[int, ...]) -> None:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize

    config = SimpleNamespace(weight_block_size=(BLOCK, BLOCK), scale_fmt=None)
    quantizer = SimpleNamespace(quantization_config=config)
    weights = drawn(shape, 1, -5)
    weights[..., :BLOCK, :BLOCK] = 0
    theirs = Fp8Quantize(quantizer).convert({"x.weight": weights})
    values, scales = quantise(weights, "block")
    assert torch.equal(values.view(torch.uint8), theirs["x.weight"].view(torch.uint8))
    assert torch.equal(scales, theirs["x.weight_scale_inv"])
    back = Fp8Dequantize(quantizer)._dequantize_one(values, scales, torch.bfloat16)
    assert torch.equal(dequantise(values, scales, "block").to(torch.bfloat16), back)


def test_a_stack_has_the_bits_of_its_matrices() -> None:
    weights = drawn((3, 48, 80), 1, -5)
    values, scales = quantise(weights, "channel")
    for index, matrix in enumerate(weights):
        alone = quantise(matrix, "channel")
        assert torch.equal(values[index].view(torch.uint8), alone[0].view(torch.uint8))
        assert torch.equal(scales[index], alone[1])


def layer_tensors(layer: int) -> Iterator[tuple[str, Tensor]]:
    prefix = f"model.layers.{layer}."
    yield f"{prefix}input_layernorm.weight", drawn((256,), 0, 0)
    yield f"{prefix}mlp.gate.weight", drawn((4, 256), 1, 0)
    for expert in range(4):
        for name, shape in (("gate_proj", (128, 256)), ("up_proj", (128, 256)), ("down_proj", (256, 128))):
            yield f"{prefix}mlp.experts.{expert}.{name}.weight", drawn(shape, 10 * layer + expert, -4)


@pytest.mark.parametrize("granularity", _EACH)
@pytest.mark.parametrize("bucket_bytes", [1, 200_000, 1 << 30])
def test_buckets_have_quantised_weights_with_scales_and_all_others_unchanged(
    bucket_bytes: int, granularity: Granularity
) -> None:
    tensors = [(name, tensor) for layer in range(2) for name, tensor in layer_tensors(layer)]
    plain = IteratedExporter(lambda: iter(tensors), bucket_bytes, torch.device("cpu"))
    fp8 = Fp8Weights(granularity, ("model.layers.0.mlp.experts",))
    exporter, suffix = Fp8Exporter(plain, fp8), "_scale_inv" if granularity == "block" else "_scale"
    sent = dict(each for bucket in exported(exporter, is_root=True) for each in bucket)
    assert list(sent) == exporter.manifest.names
    for name, tensor in tensors:
        if name.startswith("model.layers.1.mlp.experts."):
            values, scales = quantise(tensor, granularity)
            assert torch.equal(sent.pop(name).view(torch.uint8), values.view(torch.uint8)), name
            assert torch.equal(sent.pop(name + suffix), scales), name
        else:
            assert torch.equal(sent.pop(name), tensor), name
    assert not sent
    for _, tensor in tensors:
        tensor.mul_(2)
    again = dict(each for bucket in exported(exporter, is_root=True) for each in bucket)
    name = "model.layers.1.mlp.experts.3.down_proj.weight"
    scales = quantise(dict(tensors)[name], granularity)[1]
    assert torch.equal(again[name + suffix], scales), "the next sync sends new weights"


@pytest.mark.parametrize(("granularity", "scales"), [("block", 2e-4), ("channel", 6e-4)])
def test_fp8_has_half_the_bytes_on_the_wire(granularity: Granularity, scales: float) -> None:
    tensors = [("model.layers.0.mlp.down_proj.weight", torch.zeros(1024, 4096, dtype=torch.bfloat16))]
    plain = IteratedExporter(lambda: iter(tensors), 1 << 30, torch.device("cpu"))
    exporter = Fp8Exporter(plain, Fp8Weights(granularity))
    assert exporter.manifest.nbytes / plain.manifest.nbytes == pytest.approx(0.5, abs=scales)
