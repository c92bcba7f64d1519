"""The tensors of a model that are quantised, and what config.json says about the others."""

import pytest

from dagrl.backends.families.registry import shape_of
from dagrl.backends.families.tensors import published_tensors
from dagrl.config.fp8_weights import Fp8Weights

_SIZES = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 128,
    "vocab_size": 64,
}
_EXPERTS = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 128}


def tensors_of(model_type: str, **fields: object) -> list[tuple[str, tuple[int, ...]]]:
    return list(published_tensors(shape_of({"model_type": model_type, **_SIZES, **fields})))


def quantised(fp8: Fp8Weights, tensors: list[tuple[str, tuple[int, ...]]]) -> set[str]:
    """Kinds of quantised tensors of the second layer."""
    prefix = "model.layers.1."
    return {name.removeprefix(prefix) for name in fp8.choose(tensors) if name.startswith(prefix)}


_ATTENTION = {f"self_attn.{name}_proj.weight" for name in "qkvo"}
_MLP = {f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")}
_ROUTED = {f"mlp.experts.{expert}.{name}_proj.weight" for expert in (0, 1) for name in ("gate", "up", "down")}


@pytest.mark.parametrize(
    ("model_type", "fields", "wanted"),
    [
        ("llama", {}, _ATTENTION | _MLP),
        ("qwen2", {}, _ATTENTION | _MLP),
        ("qwen3", {"tie_word_embeddings": True}, _ATTENTION | _MLP),
        ("qwen3_moe", _EXPERTS, _ATTENTION | _ROUTED),
        (
            "mixtral",
            {"num_local_experts": 2, "num_experts_per_tok": 1},
            _ATTENTION | {f"block_sparse_moe.experts.{expert}.w{i}.weight" for expert in (0, 1) for i in (1, 2, 3)},
        ),
    ],
)
def test_linear_layers_and_experts_are_quantised_and_nothing_else(model_type, fields, wanted):
    tensors = tensors_of(model_type, **fields)
    assert quantised(Fp8Weights("block"), tensors) == wanted
    outside = {name for name in Fp8Weights("block").choose(tensors) if ".layers." not in name}
    assert not outside, "embedding and output layer keep their format"


@pytest.mark.parametrize(
    ("kept", "gone"),
    [
        (("model.layers.1",), _ATTENTION | _ROUTED),
        (("o_proj",), {"self_attn.o_proj.weight"}),
        (("model.layers.1.self_attn.k_proj",), {f"self_attn.{name}_proj.weight" for name in "qkv"}),
        (("model.layers.1.mlp.experts.0.down_proj",), _ROUTED),
        (("model.layers.0", "layers.11", "proj"), set()),
    ],
)
def test_modules_that_engines_fuse_are_kept_together(kept, gone):
    tensors = tensors_of("qwen3_moe", **_EXPERTS)
    assert quantised(Fp8Weights("block", kept), tensors) == (_ATTENTION | _ROUTED) - gone


def test_the_config_names_each_matrix_that_is_not_quantised():
    tensors = tensors_of("qwen3_moe", **_EXPERTS)
    fp8 = Fp8Weights("block", ("model.layers.0.self_attn",))
    config = fp8.quantization_config(tensors)
    matrices = {name.removesuffix(".weight") for name, shape in tensors if len(shape) == 2}
    chosen = {name.removesuffix(".weight") for name in fp8.choose(tensors)}
    assert set(config.pop("modules_to_not_convert")) == matrices - chosen
    assert "model.layers.1.mlp.gate" in matrices - chosen
    assert config == {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    }


def test_the_config_of_channels_is_that_of_published_models():
    tensors = tensors_of("qwen3", tie_word_embeddings=True)
    fp8 = Fp8Weights("channel", ("model.layers.0.self_attn.k_proj",))
    assert fp8.choose(tensors) == Fp8Weights("block", fp8.modules_to_not_convert).choose(tensors)
    config = fp8.quantization_config(tensors)
    kept = {f"model.layers.0.self_attn.{name}_proj" for name in ("q", "k", "v", "qkv")}
    assert set(config["ignore"]) == kept | {"model.embed_tokens", "lm_head"}
    group = config["config_groups"]["group_0"]
    assert (config["quant_method"], config["format"]) == ("compressed-tensors", "float-quantized")
    assert (group["weights"]["strategy"], group["input_activations"]["strategy"]) == ("channel", "token")


@pytest.mark.parametrize(
    ("granularity", "shapes"), [("block", [(1, 2), (2, 1), (1, 3)]), ("channel", [(128, 1), (129, 1), (64, 1)])]
)
def test_a_part_of_a_block_has_a_scale(granularity, shapes):
    fp8 = Fp8Weights(granularity)
    assert [fp8.scale_shape(shape) for shape in ((128, 256), (129, 1), (64, 300))] == shapes
