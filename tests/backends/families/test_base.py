"""What a Hugging Face config may ask for, and what is refused instead of computed wrongly."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from transformers import AutoConfig, PretrainedConfig

from dagrl.backends.families.registry import buildable, find_family, shape_of
from dagrl.backends.families.tensor_maps import MappedTensor
from dagrl.backends.families.tensors import model_tensors
from dagrl.backends.megatron.engine.config import transformer_config, transformer_fields
from dagrl.backends.megatron.section import MegatronEngineSpec
from dagrl.config.errors import shown

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def config(model_type: str, **fields) -> PretrainedConfig:
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    return AutoConfig.for_model(model_type, **{"num_hidden_layers": 1, "vocab_size": 16, **shape, **fields})


def rope_fields(model: PretrainedConfig) -> dict[str, Any]:
    family, fields = buildable(model.to_dict())
    return family.rope_arguments(fields)


def transformer_defaults(model: PretrainedConfig) -> Mapping[str, Any]:
    return find_family(model.model_type).transformer_defaults


def tensors(model: PretrainedConfig, rows: int, head: str = "lm") -> Iterator[MappedTensor]:
    return model_tensors(shape_of(model.to_dict()), rows, head)


def test_an_unknown_model_type_is_answered_with_the_known_ones():
    with pytest.raises(
        ValueError,
        match=r"has no model type 'phi3'; choose from: deepseek_v3, gemma2, gemma3_text, .* qwen3_moe",
    ):
        transformer_fields(config("phi3"))


@pytest.mark.parametrize(
    ("model_type", "field", "value"),
    [
        ("llama", "hidden_act", "gelu"),
        ("llama", "mlp_bias", True),
        ("llama", "attention_bias", True),
        ("qwen2", "use_sliding_window", True),
        ("qwen3", "attention_bias", True),
        ("qwen3", "use_sliding_window", True),
        ("qwen3_moe", "attention_bias", True),
        ("mixtral", "sliding_window", 4096),
        ("deepseek_v3", "rope_interleave", False),
        ("deepseek_v3", "scoring_func", "softmax"),
    ],
)
def test_features_that_a_family_lacks_are_refused(model_type, field, value):
    with pytest.raises(ValueError, match=f"has no {model_type} with {field} {shown(value)}; it takes"):
        transformer_fields(config(model_type, **{field: value}))


def test_head_size_is_the_configs_own_or_a_share_of_the_hidden_size():
    assert transformer_fields(config("qwen3", head_dim=12))["kv_channels"] == 12
    assert transformer_fields(config("qwen2"))["kv_channels"] == 8


def test_families_differ_where_their_papers_do():
    assert transformer_fields(config("qwen2"))["add_qkv_bias"] is True
    assert transformer_fields(config("qwen3"))["qk_layernorm"] is True
    assert not {"add_qkv_bias", "qk_layernorm"} & transformer_fields(config("llama")).keys()


def test_the_base_of_the_rotation_is_taken_over():
    assert rope_fields(config("qwen3", rope_theta=1e6)) == {"rotary_base": 1e6}


def test_llama3_scaling_is_taken_over_where_megatron_has_its_constants():
    rope = rope_fields(config("llama", rope_parameters=LLAMA3))
    assert rope == {"rotary_base": 5e5, "rope_scaling": True, "rope_scaling_factor": 8.0}


@pytest.mark.parametrize(
    ("rope", "complaint"),
    [
        (LLAMA3 | {"high_freq_factor": 2.0}, "with high_freq_factor 4 only, and this model has 2.0"),
        (
            LLAMA3 | {"original_max_position_embeddings": 4096},
            "with original_max_position_embeddings 8192 only, and this model has 4096",
        ),
        ({"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}, "no rope scaling of type 'yarn'"),
        ({"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}, "rotates whole heads only"),
    ],
)
def test_rope_that_megatron_would_get_wrong_is_refused(rope, complaint):
    with pytest.raises(ValueError) as caught:
        rope_fields(config("llama", rope_parameters=rope))
    assert complaint in str(caught.value)


def test_a_tied_output_layer_is_no_tensor_of_its_own():
    tied, own = (
        [mapped.hf for mapped in tensors(config("qwen3", tie_word_embeddings=tie), 16)] for tie in (True, False)
    )
    assert own == [*tied, ("lm_head.weight",)]


# -- mixtures ---------------------------------------------------------------------------------------------------------


DEEPSEEK = {"num_hidden_layers": 4, "n_routed_experts": 16, "moe_intermediate_size": 24}
"""Beside the published defaults: 8 groups, of which 4, and of their experts 8."""


def deepseek(**fields) -> PretrainedConfig:
    return config("deepseek_v3", **{**DEEPSEEK, **fields})


def test_layers_with_experts_are_distinguished_from_dense_ones():
    shape = {"num_hidden_layers": 4, "num_experts": 4, "moe_intermediate_size": 24}
    assert transformer_fields(config("qwen3_moe", **shape))["moe_layer_freq"] == 1
    assert transformer_fields(config("qwen3_moe", **shape, mlp_only_layers=[2]))["moe_layer_freq"] == [1, 1, 0, 1]
    assert transformer_fields(config("qwen3_moe", **shape, decoder_sparse_step=2))["moe_layer_freq"] == [0, 1, 0, 1]
    assert transformer_fields(deepseek())["moe_layer_freq"] == [0, 0, 0, 1]
    assert transformer_fields(config("mixtral"))["moe_layer_freq"] == 1


def test_sizes_of_experts_come_from_where_each_family_keeps_them():
    names = ("num_moe_experts", "moe_ffn_hidden_size", "moe_router_topk")
    qwen = transformer_fields(config("qwen3_moe", num_experts=4, moe_intermediate_size=24, num_experts_per_tok=3))
    mixtral = transformer_fields(config("mixtral", num_local_experts=6))
    latent = transformer_fields(deepseek(n_shared_experts=2))
    assert [[fields[name] for name in names] for fields in (qwen, mixtral, latent)] == [
        [4, 24, 3],
        [6, 48, 2],
        [16, 24, 8],
    ]
    assert latent["moe_shared_expert_intermediate_size"] == 48
    assert latent["ffn_hidden_size"] == 48
    assert transformer_fields(config("qwen3"))["num_moe_experts"] is None


@pytest.mark.parametrize("normalised", [True, False])
def test_weights_of_experts_are_normalised_as_the_config_says(normalised):
    fields = transformer_fields(config("qwen3_moe", norm_topk_prob=normalised))
    assert fields["moe_router_pre_softmax"] is not normalised


def test_latent_attention_has_a_config_class_of_its_own():
    spec = MegatronEngineSpec(backend="megatron", group="all")
    assert type(transformer_config(deepseek(), spec)).__name__ == "MLATransformerConfig"
    assert type(transformer_config(config("mixtral"), spec)).__name__ == "TransformerConfig"
    assert rope_fields(deepseek()) == {}


def test_every_field_and_default_is_one_of_megatrons():
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    for model in (deepseek(), config("mixtral"), config("qwen3_moe"), config("llama")):
        known = {field.name for field in dataclasses.fields(MLATransformerConfig)}
        assert transformer_fields(model).keys() | transformer_defaults(model).keys() <= known


def test_defaults_leave_routing_to_the_weights():
    for model in (deepseek(), config("mixtral"), config("qwen3_moe")):
        defaults = transformer_defaults(model)
        assert (defaults["moe_router_load_balancing_type"], defaults["moe_aux_loss_coeff"]) == ("none", 0.0)
        assert (defaults["moe_grouped_gemm"], defaults["moe_token_dispatcher_type"]) == (True, "alltoall")
    assert transformer_defaults(deepseek())["moe_router_bias_update_rate"] == 0.0
    assert transformer_defaults(config("llama")) == {}


def test_groups_of_experts_limit_the_choice_where_not_all_are_chosen():
    limited = transformer_fields(deepseek())
    assert (limited["moe_router_num_groups"], limited["moe_router_group_topk"]) == (8, 4)
    free = transformer_fields(deepseek(n_group=1, topk_group=1, num_experts_per_tok=6))
    assert not {"moe_router_num_groups", "moe_router_group_topk"} & free.keys()


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"num_experts_per_tok": 4}, "the sum of their best 1 experts .*, and this model by their best 2"),
        ({"norm_topk_prob": False}, "norm_topk_prob false with num_experts_per_tok 8"),
        ({"num_experts_per_tok": 1, "n_group": 1, "topk_group": 1}, "norm_topk_prob true with num_experts_per_tok 1"),
        ({"first_k_dense_replace": 4}, "no layer with experts"),
        ({"rope_parameters": LLAMA3}, "no rope scaling of type 'llama3'; it knows default or yarn"),
    ],
    ids=["group-score", "normalisation", "normalisation-of-one", "dense", "rope"],
)
def test_a_deepseek_that_megatron_would_get_wrong_is_refused(fields, complaint):
    with pytest.raises(ValueError, match=complaint):
        transformer_fields(deepseek(**fields))


YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 40.0, "original_max_position_embeddings": 4096}


def test_yarn_is_part_of_the_config():
    fields = transformer_fields(deepseek(rope_parameters=YARN | {"mscale": 0.5, "mscale_all_dim": 0.25}))
    names = ("rope_type", "rotary_base", "rotary_scaling_factor", "original_max_position_embeddings")
    assert [fields[name] for name in names] == ["yarn", 1e4, 40.0, 4096]
    assert [fields[name] for name in ("beta_fast", "beta_slow", "mscale", "mscale_all_dim")] == [32.0, 1.0, 0.5, 0.25]
    assert transformer_fields(deepseek())["rope_type"] == "rope"


@pytest.mark.parametrize(
    ("more", "complaint"),
    [
        ({"attention_factor": 1.5}, "attention_factor"),
        ({"truncate": False}, "truncate: false"),
        ({"mscale_all_dim": 1.0}, "reads mscale_all_dim together with mscale only"),
    ],
)
def test_yarn_that_megatron_reads_otherwise_is_refused(more, complaint):
    with pytest.raises(ValueError, match=complaint):
        transformer_fields(deepseek(rope_parameters=YARN | more))


@pytest.mark.parametrize(
    "scales", [{}, {"mscale": 1.0, "mscale_all_dim": 1.0}, {"mscale": 0.7, "mscale_all_dim": 1.3}, {"mscale": 0.7}]
)
def test_megatrons_yarn_turns_and_scales_as_hugging_faces(scales):
    from megatron.core.models.common.embeddings import YarnRotaryEmbedding, _yarn_get_mscale
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention, DeepseekV3RotaryEmbedding

    model = deepseek(rope_parameters=YARN | scales, max_position_embeddings=163840, qk_rope_head_dim=64)
    fields = transformer_fields(model)
    theirs = DeepseekV3RotaryEmbedding(model)
    names = ("original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
    ours = YarnRotaryEmbedding(
        64,
        rotary_base=fields["rotary_base"],
        scaling_factor=fields["rotary_scaling_factor"],
        use_cpu_initialization=True,
        **{name: fields[name] for name in names},
    )
    angles, scale = ours.get_emb(2)
    torch.testing.assert_close(angles[1, 0, 0, :32], theirs.inv_freq, rtol=1e-6, atol=0)
    assert scale == pytest.approx(theirs.attention_scaling, rel=1e-7)
    softmax_scale = _yarn_get_mscale(fields["rotary_scaling_factor"], fields["mscale_all_dim"]) ** 2
    with torch.device("meta"):
        attention = DeepseekV3Attention(model, 0)
    assert softmax_scale * attention.qk_head_dim**-0.5 == pytest.approx(attention.scaling, rel=1e-7)


def test_tensors_of_experts_have_the_numbers_of_the_whole_model():
    rows = {row.megatron: row for row in tensors(config("mixtral", num_hidden_layers=2, num_local_experts=3), 16)}
    row = rows["decoder.layers.1.mlp.experts.linear_fc1.weight2"]
    assert row.hf == tuple(f"model.layers.1.block_sparse_moe.experts.2.{name}.weight" for name in ("w1", "w3"))
    assert (row.layer, row.expert) == (1, 2)


def test_queries_without_a_latent_have_one_projection():
    names = {row.megatron for row in tensors(deepseek(q_lora_rank=None), 16)}
    assert "decoder.layers.0.self_attention.linear_q_proj.weight" in names
    assert not any("linear_q_up_proj" in name or "linear_q_down_proj" in name for name in names)


@pytest.mark.parametrize("head", ["value", "reward"])
def test_a_head_takes_the_place_of_the_output_layer(head):
    for tie in (True, False):
        *_, last = tensors(config("qwen3", tie_word_embeddings=tie), 16, head)
        assert (last.megatron, last.hf) == ("output_layer.weight", ("score.weight",))
