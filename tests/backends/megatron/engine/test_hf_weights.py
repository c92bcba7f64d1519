"""Weights go into the model and come out again to the bit, in every layout."""

import copy
import logging
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch


@pytest.fixture(scope="session")
def exported(export_chunks) -> Any:
    """``exported(chunks, hf_model, bucket_bytes, head)``: the weights as arrays, bucket by bucket."""

    def arrays(*args: Any) -> list[dict[str, np.ndarray]]:
        return [{name: tensor.numpy() for name, tensor in bucket} for bucket in export_chunks(*args)]

    return arrays


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp2": (2, {"tp": 2, "sequence_parallel": True}),
    "dp2": (2, {}),
    "cp2": (2, {"cp": 2}),
    "pp2": (2, {"pp": 2}),
    "pp2-vpp2": (2, {"pp": 2, "vpp": 2}),
    "tp2-dp2": (4, {"tp": 2, "sequence_parallel": True}),
    # More ranks than the two key heads.
    "tp4": (4, {"tp": 4, "sequence_parallel": True}),
    "tp2-pp2": (4, {"tp": 2, "pp": 2, "sequence_parallel": True}),
    "cp2-pp2": (4, {"cp": 2, "pp": 2}),
}
EXPERT_LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "ep2": (2, {"ep": 2}),
    "etp2": (2, {"tp": 2, "etp": 2, "sequence_parallel": True}),
    "tp2-ep2": (2, {"tp": 2, "ep": 2, "sequence_parallel": True}),
    "cp2-ep4": (4, {"cp": 2, "ep": 4}),
    "tp2-ep2-etp2": (4, {"tp": 2, "ep": 2, "etp": 2, "sequence_parallel": True}),
    "ep2-pp2-vpp2": (4, {"ep": 2, "pp": 2, "vpp": 2}),
    "tp2-ep2-pp2": (4, {"tp": 2, "ep": 2, "pp": 2, "sequence_parallel": True}),
}


def assert_exported(answers: list[list[dict[str, np.ndarray]]], weights: dict[str, torch.Tensor]) -> None:
    first, *others = answers
    found = {name: array for bucket in first for name, array in bucket.items()}
    assert sum(map(len, first)) == len(weights), "each tensor once"
    assert found.keys() == weights.keys()
    for name, tensor in weights.items():
        np.testing.assert_array_equal(found[name], tensor.numpy(), err_msg=name)
    assert len(first) > 3
    assert all(bucket == [{}] * len(first) for bucket in others), "in step, and empty"


def test_loaded_weights_are_exported_to_the_bit(exported, run_ranks, load_chunks, megatron_spec, hf_any, weights_of):
    def on_rank(rank: int) -> list[dict[str, np.ndarray]]:
        return exported(load_chunks(hf_any, megatron_spec()), hf_any, 8000)

    assert_exported(run_ranks(1, on_rank), weights_of(hf_any))


@pytest.mark.parametrize("name", ["qwen2", "qwen3_tied"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_dense_weights_come_out_of_any_layout(
    exported, run_ranks, load_chunks, megatron_spec, hf_model_of, weights_of, name, layout
):
    hf_model, (ranks, sizes) = hf_model_of(name), LAYOUTS[layout]

    def on_rank(rank: int) -> list[dict[str, np.ndarray]]:
        return exported(load_chunks(hf_model, megatron_spec(**sizes)), hf_model, 8000)

    assert_exported(run_ranks(ranks, on_rank), weights_of(hf_model))


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        *(("deepseek_v3", layout) for layout in EXPERT_LAYOUTS),
        *(("deepseek_v3_moonlight", layout) for layout in ("tp2-ep2-etp2", "tp2-ep2-pp2")),
        *((name, layout) for name in ("qwen3_moe_mixed", "mixtral") for layout in ("tp2-ep2", "etp2", "ep2-pp2-vpp2")),
    ],
)
def test_weights_of_mixtures_come_out_of_any_layout(
    exported, run_ranks, load_chunks, megatron_spec, hf_model_of, weights_of, name, layout
):
    hf_model, (ranks, sizes) = hf_model_of(name), EXPERT_LAYOUTS[layout]

    def on_rank(rank: int) -> list[dict[str, np.ndarray]]:
        return exported(load_chunks(hf_model, megatron_spec(**sizes)), hf_model, 30_000)

    assert_exported(run_ranks(ranks, on_rank), weights_of(hf_model))


@pytest.mark.parametrize(
    "tail", [{"num_layers_in_last_pipeline_stage": 1}, {"pipeline_model_parallel_layout": "Ettt|tL"}]
)
def test_uneven_stages_hold_their_own_layers(exported, run_ranks, load_chunks, megatron_spec, qwen3, weights_of, tail):
    def on_rank(rank: int) -> tuple[int, Any]:
        chunks = load_chunks(qwen3, megatron_spec(pp=2, **tail))
        return len(chunks[0].decoder.layers), exported(chunks, qwen3, 8000)

    layers, answers = zip(*run_ranks(2, on_rank), strict=True)
    assert layers == (3, 1)
    assert_exported(list(answers), weights_of(qwen3))


def test_experts_in_modules_of_their_own_have_the_same_names(
    exported, run_ranks, load_chunks, megatron_spec, hf_model_of, weights_of
):
    mixtral = hf_model_of("mixtral")

    def on_rank(rank: int) -> list[dict[str, np.ndarray]]:
        chunks = load_chunks(mixtral, megatron_spec(ep=2, moe_grouped_gemm=False))
        return exported(chunks, mixtral, 30_000)

    assert_exported(run_ranks(2, on_rank), weights_of(mixtral))


def test_buckets_are_the_same_at_any_layout(exported, run_ranks, load_chunks, megatron_spec, hf_model_of):
    hf_model = hf_model_of("deepseek_v3")

    def buckets(ranks: int, **sizes: Any) -> list[list[str]]:
        def on_rank(rank: int) -> list[list[str]]:
            return [
                list(bucket) for bucket in exported(load_chunks(hf_model, megatron_spec(**sizes)), hf_model, 30_000)
            ]

        return run_ranks(ranks, on_rank)[0]

    assert buckets(1) == buckets(4, tp=2, ep=2, pp=2, sequence_parallel=True)


def test_bf16_weights_and_the_float32_bias_of_a_router_keep_their_dtypes(
    export_chunks, run_ranks, load_chunks, megatron_spec, hf_model_of, weights_of
):
    hf_model = hf_model_of("deepseek_v3")

    def on_rank(rank: int) -> dict[str, Any]:
        chunks = load_chunks(hf_model, megatron_spec(ep=2, pp=2, bf16=True))
        buckets = export_chunks(chunks, hf_model, 30_000)
        return {name: (tensor.dtype, tensor.float().numpy()) for bucket in buckets for name, tensor in bucket}

    found = run_ranks(4, on_rank)[0]
    for name, tensor in weights_of(hf_model).items():
        kept = torch.float32 if name.endswith("e_score_correction_bias") else torch.bfloat16
        assert found[name][0] == kept, name
        np.testing.assert_array_equal(found[name][1], tensor.to(kept).float().numpy(), err_msg=name)


def test_a_rank_reads_only_what_it_holds(run_ranks, load_chunks, megatron_spec, hf_model_of, weight_recorder):
    hf_model = hf_model_of("deepseek_v3")

    def on_rank(rank: int) -> set[str]:
        from dagrl.backends.megatron.engine.hf_weights import load_hf_weights

        chunks = load_chunks(hf_model, megatron_spec(ep=2, pp=2))
        recorder = weight_recorder(hf_model)
        load_hf_weights(chunks, hf_model.config, recorder)
        return recorder.read

    answers = run_ranks(4, on_rank)
    assert set().union(*answers) == set(weight_recorder(hf_model).names())
    for stage, pair in enumerate((answers[:2], answers[2:])):
        for rank, read in enumerate(pair):
            layers = {int(name.split(".")[2]) for name in read if name.startswith("model.layers.")}
            experts = {int(name.split(".")[5]) for name in read if ".mlp.experts." in name}
            assert layers == {2 * stage, 2 * stage + 1}
            assert experts == set(range(4 * rank, 4 * rank + 4))
            assert ("lm_head.weight" in read, "model.embed_tokens.weight" in read) == (stage == 1, stage == 0)


@pytest.mark.parametrize("limit", [13_000, 30_000])
def test_buckets_are_filled_up_to_their_size(exported, run_ranks, load_chunks, megatron_spec, qwen3, limit):
    def on_rank(rank: int) -> list[dict[str, np.ndarray]]:
        return exported(load_chunks(qwen3, megatron_spec()), qwen3, limit)

    (buckets,) = run_ranks(1, on_rank)
    sizes = [sum(array.nbytes for array in bucket.values()) for bucket in buckets]
    assert max(sizes) <= limit
    assert all(size + following > limit for size, following in pairwise(sizes))


def test_a_parameter_larger_than_a_bucket_has_one_to_itself(exported, run_ranks, load_chunks, megatron_spec, qwen3):
    def on_rank(rank: int) -> list[dict[str, np.ndarray]]:
        return exported(load_chunks(qwen3, megatron_spec()), qwen3, 1)

    (buckets,) = run_ranks(1, on_rank)
    assert len(buckets) == 2 + 8 * 4 + 1, "one for each parameter of Megatron's model"
    assert [len(bucket) for bucket in buckets[:3]] == [1, 1, 3], "embedding, norm; query, key and value"


def test_exported_tensors_do_not_change_with_the_model(export_chunks, run_ranks, load_chunks, megatron_spec, qwen3):
    def on_rank(rank: int) -> tuple[float, int]:
        chunks = load_chunks(qwen3, megatron_spec())
        (bucket,) = export_chunks(chunks, qwen3, 1 << 30)
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
        ("model.layers.1.self_attn.q_proj.bias", torch.ones(48), "hold 1 tensor that a qwen3 of this config does not"),
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


def test_buffers_that_old_files_hold_are_left_out(exported, run_ranks, load_chunks, megatron_spec, qwen3):
    def on_rank(rank: int) -> int:
        derived = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(6)}
        return sum(map(len, exported(load_chunks(qwen3, megatron_spec(), **derived), qwen3, 1 << 20)))

    assert run_ranks(1, on_rank) == [len(list(qwen3.parameters()))]


# -- what a folder may hold beside the model, or instead of it --------------------------------------------------------


def test_layers_that_predict_further_tokens_are_left_out_and_named(
    exported, run_ranks, load_chunks, megatron_spec, hf_model_of, weights_of, caplog
):
    hf_model = copy.deepcopy(hf_model_of("deepseek_v3"))
    hf_model.config.num_nextn_predict_layers = 1

    def on_rank(rank: int) -> Any:
        extra = {f"model.layers.4.{name}": torch.ones(32) for name in ("enorm.weight", "hnorm.weight")}
        with caplog.at_level(logging.WARNING):
            chunks = load_chunks(hf_model, megatron_spec(), **extra)
        return caplog.messages, exported(chunks, hf_model, 8000)

    ((messages, buckets),) = run_ranks(1, on_rank)
    (message,) = (message for message in messages if "predict" in message)
    assert "2 tensors" in message and "model.layers.4.enorm.weight" in message
    assert_exported([buckets], weights_of(hf_model))


def test_a_layer_too_many_is_no_prediction_layer(run_ranks, load_chunks, megatron_spec, qwen3):
    def on_rank(rank: int) -> None:
        with pytest.raises(ValueError, match="hold 1 tensor that a qwen3 of this config does not have"):
            load_chunks(qwen3, megatron_spec(), **{"model.layers.4.input_layernorm.weight": torch.ones(32)})

    run_ranks(1, on_rank)


def test_weights_in_8_bits_are_refused(run_ranks, load_chunks, megatron_spec, hf_model_of):
    def on_rank(rank: int) -> None:
        scale = {"model.layers.1.mlp.experts.0.gate_proj.weight_scale_inv": torch.ones(1, 1)}
        with pytest.raises(ValueError, match=r"the weights are in 8 bits, .* convert the folder to bfloat16 first"):
            load_chunks(hf_model_of("deepseek_v3"), megatron_spec(), **scale)

    run_ranks(1, on_rank)


def test_an_expert_of_another_size_is_named(run_ranks, load_chunks, megatron_spec, hf_model_of):
    def on_rank(rank: int) -> None:
        name = "model.layers.2.block_sparse_moe.experts.1.w2.weight"
        with pytest.raises(ValueError, match=rf"tensor '{name}' is \[32, 47\], but its config says \[32, 48\]"):
            load_chunks(hf_model_of("mixtral"), megatron_spec(), **{name: torch.ones(32, 47)})

    run_ranks(1, on_rank)


@pytest.mark.parametrize(("head", "name"), [("value", "qwen3"), ("reward", "qwen3_tied"), ("reward", "qwen3_moe")])
def test_a_score_is_loaded_and_exported_in_place_of_the_output_layer(
    exported, run_ranks, load_chunks, megatron_spec, hf_model_of, weights_of, head, name
):
    hf_model = hf_model_of(name)
    score = torch.linspace(-1, 1, 32)[None]

    def on_rank(rank: int) -> list[dict[str, np.ndarray]]:
        spec = megatron_spec(2, True, pp=2, head=head)
        chunks = load_chunks(hf_model, spec, **{"score.weight": score})
        return exported(chunks, hf_model, 8000, head)

    expected = weights_of(hf_model) | {"score.weight": score}
    # A folder of a language model may be the start of a critic; its output layer has no place in it.
    expected.pop("lm_head.weight", None)
    assert_exported(run_ranks(4, on_rank), expected)


def test_a_value_head_without_weights_starts_at_zero(run_ranks, load_chunks, megatron_spec, qwen3):
    def on_rank(rank: int) -> np.ndarray:
        from dagrl.backends.megatron.engine.output import ScalarHead

        (chunk,) = load_chunks(qwen3, megatron_spec(head="value"))
        assert isinstance(chunk.output_layer, ScalarHead)
        return chunk.output_layer.weight.detach().numpy()

    (weight,) = run_ranks(1, on_rank)
    assert weight.shape == (1, 32) and not weight.any()


def test_a_reward_head_without_weights_is_refused(run_ranks, load_chunks, megatron_spec, qwen3):
    def on_rank(rank: int) -> None:
        with pytest.raises(ValueError, match=r"head: reward needs .* these have no score.weight"):
            load_chunks(qwen3, megatron_spec(head="reward"))

    run_ranks(1, on_rank)


def test_a_random_reward_head_is_drawn_like_any_matrix(run_ranks, load_chunks, megatron_spec, qwen3):
    def on_rank(rank: int) -> np.ndarray:
        from dagrl.backends.megatron.engine.hf_weights import load_hf_weights
        from dagrl.backends.runtime.initial_weights import RandomWeights

        (chunk,) = load_chunks(qwen3, megatron_spec(head="value"))
        load_hf_weights([chunk], qwen3.config, RandomWeights(qwen3.config, seed=5), "reward")
        return chunk.output_layer.weight.detach().numpy()

    (weight,) = run_ranks(1, on_rank)
    assert weight.std() == pytest.approx(qwen3.config.initializer_range, rel=0.5)
