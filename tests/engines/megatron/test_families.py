"""What a Hugging Face config may ask for, and what is refused instead of computed wrongly."""

import pytest
from transformers import AutoConfig, PretrainedConfig

from dagrl.engines.megatron.families import family_of, rope_fields, tensors, transformer_fields

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


def test_an_unknown_model_type_is_answered_with_the_known_ones():
    with pytest.raises(ValueError, match="does not know model type 'gemma2'; it knows llama, qwen2, qwen3"):
        family_of(config("gemma2"))


@pytest.mark.parametrize(
    ("model_type", "field", "value"),
    [
        ("llama", "hidden_act", "gelu"),
        ("llama", "mlp_bias", True),
        ("llama", "attention_bias", True),
        ("qwen2", "use_sliding_window", True),
        ("qwen3", "attention_bias", True),
        ("qwen3", "use_sliding_window", True),
    ],
)
def test_what_a_family_lacks_is_refused(model_type, field, value):
    with pytest.raises(ValueError, match=f"has no {model_type} with {field}: {value!r}; it takes"):
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
        (LLAMA3 | {"high_freq_factor": 2.0}, "this model has {'high_freq_factor': 2.0}"),
        (LLAMA3 | {"original_max_position_embeddings": 4096}, "{'original_max_position_embeddings': 4096}"),
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
