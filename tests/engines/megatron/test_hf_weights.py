"""Weights go into the model and come out again to the bit, in every layout."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch


def exported(chunks: list[Any], hf_model: Any, bucket_bytes: int) -> list[dict[str, np.ndarray]]:
    from dagrl.engines.megatron.hf_weights import export_hf_weights

    buckets = export_hf_weights(chunks, hf_model.config, bucket_bytes)
    return [{name: tensor.numpy() for name, tensor in bucket} for bucket in buckets]


@pytest.mark.parametrize(("ranks", "tp"), [(1, 1), (2, 2), (2, 1), (4, 2)], ids=["tp1", "tp2", "dp2", "tp2-dp2"])
def test_what_was_loaded_is_exported_to_the_bit_by_rank_0_alone(
    run_ranks, load_chunks, megatron_spec, hf_model, ranks, tp
):
    def on_rank(rank: int) -> list[dict[str, np.ndarray]]:
        return exported(load_chunks(hf_model, megatron_spec(tp)), hf_model, bucket_bytes=8000)

    first, *others = run_ranks(ranks, on_rank)
    weights = {name: tensor.detach().numpy() for name, tensor in hf_model.named_parameters()}
    found = {name: array for bucket in first for name, array in bucket.items()}
    assert sum(map(len, first)) == len(weights), "each tensor once"
    assert found.keys() == weights.keys()
    for name, array in weights.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)
    assert len(first) > 3
    assert all(bucket == [{}] * len(first) for bucket in others), "in step, and empty"


@pytest.mark.parametrize("limit", [13_000, 30_000])
def test_buckets_are_filled_up_to_their_size(run_ranks, load_chunks, megatron_spec, qwen3, limit):
    def on_rank(rank: int) -> list[dict[str, np.ndarray]]:
        return exported(load_chunks(qwen3, megatron_spec()), qwen3, limit)

    (buckets,) = run_ranks(1, on_rank)
    sizes = [sum(array.nbytes for array in bucket.values()) for bucket in buckets]
    assert max(sizes) <= limit
    assert all(size + following > limit for size, following in pairwise(sizes))


def test_a_parameter_larger_than_a_bucket_has_one_to_itself(run_ranks, load_chunks, megatron_spec, qwen3):
    def on_rank(rank: int) -> list[dict[str, np.ndarray]]:
        return exported(load_chunks(qwen3, megatron_spec()), qwen3, bucket_bytes=1)

    (buckets,) = run_ranks(1, on_rank)
    assert len(buckets) == 2 + 8 * 2 + 1, "one for each parameter of Megatron's model"
    assert [len(bucket) for bucket in buckets[:3]] == [1, 1, 3], "embedding, norm; query, key and value"


def test_exported_tensors_do_not_change_with_the_model(run_ranks, load_chunks, megatron_spec, qwen3):
    def on_rank(rank: int) -> tuple[float, int]:
        from dagrl.engines.megatron.hf_weights import export_hf_weights

        chunks = load_chunks(qwen3, megatron_spec())
        (bucket,) = export_hf_weights(chunks, qwen3.config, bucket_bytes=1 << 30)
        for parameter in chunks[0].parameters():
            parameter.data.zero_()
        alike = [name for name, tensor in bucket if torch.equal(tensor, qwen3.get_parameter(name))]
        owned = [name for name, tensor in bucket if tensor.untyped_storage().nbytes() == tensor.nbytes]
        return len(alike), len(owned), len(bucket)

    ((alike, owned, total),) = run_ranks(1, on_rank)
    assert alike == owned == total == len(list(qwen3.parameters()))


def test_padding_of_the_vocabulary_is_zero(run_ranks, load_chunks, megatron_spec, qwen3):
    def on_rank(rank: int) -> np.ndarray:
        chunk = load_chunks(qwen3, megatron_spec(2))[0]
        return chunk.output_layer.weight.detach().numpy()

    rows = np.concatenate(run_ranks(2, on_rank))
    assert rows.shape == (64, 32)
    assert not rows[59:].any() and rows[:59].all()


@pytest.mark.parametrize(
    ("name", "tensor", "complaint"),
    [
        ("model.norm.weight", None, "no tensor 'model.norm.weight'"),
        ("model.norm.weight", torch.ones(31), r"tensor 'model.norm.weight' is \[31\], but its config says \[32\]"),
        (
            "model.layers.1.self_attn.k_proj.weight",
            torch.ones(48, 32),
            r"is \[48, 32\], but its config says \[24, 32\]",
        ),
        ("model.layers.1.self_attn.q_proj.bias", torch.ones(48), "hold 1 tensors that a qwen3 of this config does not"),
    ],
    ids=["missing", "wrong-shape", "wrong-heads", "unknown"],
)
def test_weights_that_do_not_fit_the_config_are_refused(
    run_ranks, load_chunks, megatron_spec, qwen3, name, tensor, complaint
):
    def on_rank(rank: int) -> None:
        with pytest.raises(ValueError, match=complaint):
            load_chunks(qwen3, megatron_spec(), **{name: tensor})

    run_ranks(1, on_rank)


def test_buffers_that_old_files_hold_are_left_out(run_ranks, load_chunks, megatron_spec, qwen3):
    def on_rank(rank: int) -> int:
        derived = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(6)}
        return sum(map(len, exported(load_chunks(qwen3, megatron_spec(), **derived), qwen3, 1 << 20)))

    assert run_ranks(1, on_rank) == [len(list(qwen3.parameters()))]
