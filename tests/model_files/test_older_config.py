"""Configs that are written have the keys of transformers 4, as far as it names them otherwise."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from dagrl.config.schema import ModelSpec, TokenizerSpec
from dagrl.model_files.hf_folder import copy_tokenizer, write_config, write_hf_folder

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "torch_dtype": "bfloat16",
    "rope_theta": 123456.0,
}
MIXTURE = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
VISION = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096, "mscale": 1.0, "mscale_all_dim": 1.0}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}
MROPE = {"mrope_interleaved": True, "mrope_section": [2, 3, 3], "rope_type": "default"}
OLDER: dict[str, dict[str, Any]] = {
    "llama": {"rope_scaling": LLAMA3},
    "qwen2": {"rope_scaling": None},
    "qwen3": {"head_dim": 32},
    "mistral": {},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {**MIXTURE, "num_experts": 4, "shared_expert_intermediate_size": 32},
    "qwen3_moe": {**MIXTURE, "num_experts": 4},
    "qwen3_next": {
        **MIXTURE,
        "num_experts": 4,
        "partial_rotary_factor": 0.25,
        "linear_num_value_heads": 4,
        "full_attention_interval": 4,
    },
    "gemma2": {"head_dim": 16},
    "gemma3_text": {
        "head_dim": 16,
        "sliding_window_pattern": 3,
        "rope_local_base_freq": 7777.0,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    },
    "gpt_oss": {"head_dim": 16, "num_local_experts": 4, "rope_scaling": {**YARN, "rope_type": "yarn"}},
    "deepseek_v3": {**MIXTURE, "n_routed_experts": 4, "rope_scaling": YARN, "first_k_dense_replace": 1},
    "glm4_moe": {**MIXTURE, "n_routed_experts": 4, "partial_rotary_factor": 0.25, "first_k_dense_replace": 1},
    "nemotron": {"partial_rotary_factor": 0.25},
    "qwen2_5_vl": {"vision_config": VISION, "text_config": {**SIZES, "rope_scaling": {**MROPE, "type": "mrope"}}},
    "qwen3_vl": {
        "text_config": {**SIZES, "head_dim": 16, "rope_scaling": MROPE, "model_type": "qwen3_vl_text"},
        "vision_config": {**VISION, "deepstack_visual_indexes": [0]},
    },
}
"""Configs of every family as transformers 4 writes them, as far as the two differ."""


def written(source: Path, folder: Path, *, beside: bool) -> dict[str, Any]:
    """The config of a folder that is written from the config of `source`."""
    from dagrl.model_files.library_model import load_hf_config

    folder.mkdir()
    config = load_hf_config(ModelSpec(path=source))
    weights = [("model.norm.weight", torch.ones(16, dtype=torch.bfloat16))]
    write_hf_folder(folder, config, "Any", weights, source=source if beside else None)
    return json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize("beside", [True, False], ids=["with its source", "alone"])
@pytest.mark.parametrize("family", OLDER)
def test_transformers_4_finds_all_it_needs_and_transformers_5_reads_the_same(
    tmp_path: Path, family: str, beside: bool
) -> None:
    from transformers import AutoConfig

    older = {"model_type": family, **({} if "text_config" in OLDER[family] else SIZES), **OLDER[family]}
    (tmp_path / "config.json").write_text(json.dumps(older))
    config = written(tmp_path, tmp_path / "out", beside=beside)
    for section, found in ((older, config), (older.get("text_config", {}), config.get("text_config", {}))):
        for name, value in section.items():
            if isinstance(value, dict):
                assert found[name].items() >= value.items() or name == "vision_config", name
            else:
                assert found[name] == value, name
    read = [AutoConfig.from_pretrained(folder).to_dict() for folder in (tmp_path, tmp_path / "out")]
    # Where it finds layer_types, the class keeps this one as an unknown key.
    read[1].pop("full_attention_interval", None)
    of_the_folder = {name: read[0][name] for name in ("_name_or_path", "architectures", "dtype")}
    assert {**read[1], **of_the_folder} == read[0]


def test_keys_that_only_the_source_has_are_kept_but_for_those_of_its_weights(tmp_path: Path) -> None:
    older = {
        "model_type": "llama",
        **SIZES,
        "pretraining_note": "x",
        "auto_map": {"AutoConfig": "code.Config"},
        "torch_dtype": "float32",
        "quantization_config": {"quant_method": "fp8"},
        "rope_theta": 7.0,
    }
    (tmp_path / "config.json").write_text(json.dumps(older))
    config = written(tmp_path, tmp_path / "out", beside=True)
    assert (config["pretraining_note"], config["rope_theta"]) == ("x", 7.0)
    assert config["dtype"] == config["torch_dtype"] == "bfloat16"
    assert "quantization_config" not in config


def test_a_made_tokenizer_names_a_class_that_transformers_4_has(tmp_path: Path) -> None:
    model = ModelSpec(init={"model_type": "llama"}, tokenizer=TokenizerSpec(kind="bytes"))
    copy_tokenizer(model, tmp_path)
    assert json.loads((tmp_path / "tokenizer_config.json").read_text())["tokenizer_class"] == "PreTrainedTokenizerFast"


def test_servers_read_where_layers_of_gated_delta_nets_stand_and_that_the_tower_adds_to_none(tmp_path: Path) -> None:
    from transformers import AutoConfig

    tower = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}
    config = AutoConfig.for_model(
        "qwen3_5", text_config={**SIZES, "layer_types": ["linear_attention", "full_attention"] * 3}, vision_config=tower
    )
    write_config(tmp_path, config)
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["text_config"]["full_attention_interval"] == 2
    assert written["vision_config"]["deepstack_visual_indexes"] == []
    assert AutoConfig.from_pretrained(tmp_path).text_config.layer_types == config.text_config.layer_types
