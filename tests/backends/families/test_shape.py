"""Counts of parameters equal those of the models themselves, built without memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import BRIDGED, DENSE, MIXTURES, tiny_hf_model

from dagrl.backends.families.registry import model_shape, shape_of
from dagrl.backends.families.shape import ModelShape
from dagrl.config.schema import ModelSpec
from dagrl.model_files.library_classes import NO_CLASS

PUBLISHED: dict[str, dict[str, Any]] = {
    "Qwen3-1.7B": {
        "model_type": "qwen3",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
    },
    "Qwen3-8B": {
        "model_type": "qwen3",
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 151936,
    },
    "Qwen2.5-7B": {
        "model_type": "qwen2",
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152064,
    },
    "Llama-3.1-8B": {
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
    },
    "Qwen3-30B-A3B": {
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
        "vocab_size": 151936,
    },
    # The defaults of these two classes are the published shapes.
    "Mixtral-8x7B": {"model_type": "mixtral"},
    "DeepSeek-V3": {"model_type": "deepseek_v3"},
    "Moonlight-16B-A3B": {
        "model_type": "deepseek_v3",
        "hidden_size": 2048,
        "intermediate_size": 11264,
        "moe_intermediate_size": 1408,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "q_lora_rank": None,
        "vocab_size": 163840,
    },
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_those_of_the_published_model(name: str) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = PUBLISHED[name]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields))
    assert shape_of(fields).parameters == sum(tensor.numel() for tensor in model.parameters())


@pytest.mark.parametrize("name", [*DENSE, *MIXTURES, *BRIDGED])
def test_parameters_are_those_of_every_variant(name: str) -> None:
    model = tiny_hf_model(name)
    assert shape_of(model.config.to_dict()).parameters == sum(tensor.numel() for tensor in model.parameters())


@pytest.mark.parametrize(
    ("name", "billions", "active"),
    [
        # As the makers say them.
        ("Qwen3-8B", 8.19, 8.19),
        ("Qwen3-30B-A3B", 30.5, 3.3),
        ("Mixtral-8x7B", 46.7, 12.9),
        ("DeepSeek-V3", 671, 37.5),
    ],
)
def test_parameters_that_a_token_meets(name: str, billions: float, active: float) -> None:
    shape = shape_of(PUBLISHED[name])
    assert shape.parameters == pytest.approx(billions * 1e9, rel=0.01)
    assert shape.active_parameters == pytest.approx(active * 1e9, rel=0.02)


def test_cache_of_a_token() -> None:
    # Keys and values of 8 heads of 128; with latent attention their 512 compressed values, and 64 with positions.
    assert shape_of(PUBLISHED["Qwen3-8B"]).cache_values_per_token == 2 * 8 * 128
    assert shape_of(PUBLISHED["DeepSeek-V3"]).cache_values_per_token == 512 + 64


def test_a_missing_config_field_has_the_default_of_its_class() -> None:
    # 4096 / 32 = 128 wide heads, as many for keys; 152064 tokens only in this config.
    shape = shape_of({"model_type": "llama", "vocab_size": 1000, "num_hidden_layers": 2})
    assert (shape.hidden, shape.head_dim, shape.key_value_heads, shape.vocabulary) == (4096, 128, 32, 1000)


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"model_type": "gpt2"}, "no family has the model type 'gpt2'; known are deepseek_v3, gemma2"),
        ({"hidden_size": 8}, "no family has the model type None"),
        ({"model_type": "llama", "hidden_size": "big"}, "says hidden_size: 'big', which is no size"),
    ],
)
def test_a_shape_that_cannot_be_known_says_why(fields: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        shape_of(fields)


def test_a_missing_size_is_required(monkeypatch: pytest.MonkeyPatch) -> None:
    # As where transformers is not installed.
    monkeypatch.setattr("dagrl.backends.families.base.config_class", lambda family: NO_CLASS)
    with pytest.raises(ValueError, match="the model's config does not say hidden_size; add it"):
        shape_of({"model_type": "llama", "vocab_size": 1000, "num_attention_heads": 4})


def test_the_vocabulary_of_random_weights_is_the_tokenizers(tmp_path: Path) -> None:
    from dagrl.model_files.tokenizer import load_tokenizer

    def vocabulary(tokenizer: Any) -> ModelShape:
        model = ModelSpec(init={"model_type": "qwen3", "num_hidden_layers": 1}, tokenizer=tokenizer)
        return model_shape(model), load_tokenizer(model)

    for tokenizer in ({"kind": "characters", "alphabet": "abc"}, {"kind": "bytes"}):
        shape, real = vocabulary(tokenizer)
        assert shape.vocabulary == len(real)
        real.save_pretrained(tmp_path / tokenizer["kind"])
        shape, real = vocabulary(tmp_path / tokenizer["kind"])
        assert shape.vocabulary == len(real)


def test_a_shape_comes_out_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED["Qwen3-8B"]))
    assert model_shape(ModelSpec(path=tmp_path)) == shape_of(PUBLISHED["Qwen3-8B"])
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json is not a JSON object; copy the file again"):
        model_shape(ModelSpec(path=tmp_path))
