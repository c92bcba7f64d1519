"""Counts of operations, against numbers worked out by hand from published shapes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from transformers import CONFIG_MAPPING

from dagrl.backends.families.flops import ModelFlops, model_flops
from dagrl.backends.families.registry import shape_of

QWEN3_1B7 = {
    "model_type": "qwen3",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}
MIXTRAL_8X7B = {"model_type": "mixtral"}
"""The config class's defaults are the published shape; so are DeepSeek-V3's."""
DEEPSEEK_V3 = {"model_type": "deepseek_v3"}
QWEN3_30B_A3B = {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
}


def costs_of(fields: dict[str, Any], **changes: Any) -> ModelFlops:
    outputs = changes.pop("outputs", None)
    fields = fields | changes
    config = CONFIG_MAPPING[fields["model_type"]](**{name: fields[name] for name in fields if name != "model_type"})
    return model_flops(shape_of(config.to_dict()), outputs=outputs)


def test_a_dense_model_as_worked_out_by_hand() -> None:
    cost = costs_of(QWEN3_1B7)
    # Weights of a layer: queries and output 2 x 2048 x 2048 = 8,388,608; keys and values 2 x 2048 x 1024 = 4,194,304;
    # MLP 3 x 2048 x 6144 = 37,748,736. Together 50,331,648; 28 layers: 1,409,286,144, the
    # 1.4B without embedding of Qwen3-1.7B's model card.
    assert cost.per_token == 2 * 1_409_286_144
    # 16 heads of 128: 2048 multiply-adds for the score and 2048 for the value, in 28 layers.
    assert cost.per_pair == 2 * 28 * (2048 + 2048)
    assert cost.per_prediction == 2 * 2048 * 151_936


def test_a_pass_over_rows_as_worked_out_by_hand() -> None:
    cost = ModelFlops(per_token=10, per_pair=4, per_prediction=100)
    # 3 + 5 tokens; (9 + 25) / 2 pairs; 2 predictions.
    assert cost.forward(np.array([3, 5]), 2) == 10 * 8 + 4 * 17 + 100 * 2
    assert cost.train(np.array([3, 5]), 2) == 3 * 348
    assert cost.forward(np.zeros(0, dtype=np.int64), 0) == 0


def test_qwen3_1b7_at_the_speed_of_the_bare_step() -> None:
    # 16,384 packed tokens in rows of 2,048, every position predicting: 6 x (1,409,286,144 + 311,164,928) weights
    # and 3 x 28 x 4096 x 2048 for the causal half of attention, a token: 11,027,349,504 operations.
    cost = costs_of(QWEN3_1B7)
    rows = np.full(8, 2048)
    assert cost.train(rows, 16384) == 16384 * 11_027_349_504
    # 47.1k tokens a second on an H200 are then 519 TFLOP/s.
    per_token = cost.train(rows, 16384) / 16384
    assert 47.1e3 * per_token == pytest.approx(519e12, rel=2e-3)


def test_long_rows_cost_more_than_fits_into_64_bits() -> None:
    cost = costs_of(DEEPSEEK_V3)
    rows = np.full(1000, 10**6)
    assert cost.forward(rows, 0) == cost.per_token * 10**9 + cost.per_pair * 10**15 // 2 > 2**63


def test_a_mixture_counts_the_experts_a_token_is_sent_to() -> None:
    cost = costs_of(MIXTRAL_8X7B)
    # Attention 2 x 4096 x 4096 + 2 x 4096 x 1024 = 41,943,040; router 4096 x 8 = 32,768; two experts
    # 2 x 3 x 4096 x 14336 = 352,321,536; 32 layers of 394,297,344.
    assert cost.per_token == 2 * 32 * 394_297_344
    # With embedding and output layer: the 12.9B active parameters that Mixtral is known for.
    assert cost.per_token / 2 + 2 * 4096 * 32000 == pytest.approx(12.9e9, rel=2e-3)
    assert costs_of(MIXTRAL_8X7B, num_experts_per_tok=4).per_token - cost.per_token == 2 * 32 * 352_321_536


def test_a_mixture_may_have_dense_layers_among_its_own() -> None:
    cost = costs_of(QWEN3_30B_A3B)
    # Attention 2 x 2048 x 4096 + 2 x 2048 x 512 = 18,874,368; router 262,144; eight experts
    # 8 x 3 x 2048 x 768 = 37,748,736; 48 layers of 56,885,248. Qwen3-30B-A3B: 3.3B active parameters.
    assert cost.per_token == 2 * 48 * 56_885_248
    assert cost.per_token / 2 + 2 * 2048 * 151936 == pytest.approx(3.3e9, rel=2e-2)
    # A dense MLP has 3 x 2048 x 6144 = 37,748,736 weights, as many as the eight experts, and no router.
    for where in ({"mlp_only_layers": [0, 5]}, {"decoder_sparse_step": 2}):
        dense = 2 if "mlp_only_layers" in where else 24
        assert cost.per_token - costs_of(QWEN3_30B_A3B, **where).per_token == 2 * dense * 262_144


def test_latent_attention_and_shared_experts() -> None:
    cost = costs_of(DEEPSEEK_V3)
    # Attention: queries 7168 x 1536 + 1536 x 128 x 192 = 48,758,784; compression 7168 x (512 + 64) = 4,128,768; keys
    # and values 512 x 128 x 256 = 16,777,216; output 128 x 128 x 7168 = 117,440,512: 187,105,280.
    # Dense MLP, three layers: 3 x 7168 x 18432 = 396,361,728. Mixture, 58 layers: router 7168 x 256 = 1,835,008, and
    # eight experts and a shared one 9 x 3 x 7168 x 2048 = 396,361,728.
    assert cost.per_token == 2 * (61 * 187_105_280 + 61 * 396_361_728 + 58 * 1_835_008)
    # With embedding and output layer 37.5B: DeepSeek-V3 activates 37B.
    assert cost.per_token / 2 + 2 * 7168 * 129280 == pytest.approx(37e9, rel=2e-2)
    # 128 heads: 192 wide for the score, 128 for the value.
    assert cost.per_pair == 2 * 61 * 128 * (192 + 128)


def test_latent_attention_without_compressed_queries() -> None:
    with_rank, without = (costs_of(DEEPSEEK_V3, q_lora_rank=rank) for rank in (1536, None))
    # 7168 x 128 x 192 = 176,160,768 in place of 48,758,784.
    assert without.per_token - with_rank.per_token == 2 * 61 * (176_160_768 - 48_758_784)
    assert without.per_pair == with_rank.per_pair


def test_a_head_with_one_output_is_cheap() -> None:
    cost = costs_of(QWEN3_1B7, outputs=1)
    assert cost.per_prediction == 2 * 2048
    assert cost.per_token == costs_of(QWEN3_1B7).per_token


def test_a_head_dim_that_the_config_does_not_state_follows_from_the_heads() -> None:
    llama = {"model_type": "qwen2", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1}
    cost = costs_of(llama, num_attention_heads=4, num_key_value_heads=2, vocab_size=10)
    # 64 x 16 x (2 x 4 + 2 x 2) + 3 x 64 x 96
    assert (cost.per_token, cost.per_pair) == (2 * (12_288 + 18_432), 2 * 2 * 64)
