"""Names and shapes of tensors are those of transformers' own models."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tiny_models import BRIDGED, DENSE, MIXTURES, tiny_hf_model

from dagrl.backends.families.registry import family_named, family_names, shape_of
from dagrl.backends.families.tensors import published_tensors
from dagrl.model_files.tensor_names import is_prediction_layer

WITH_TABLES = [name for name in family_names() if family_named(name).has_tables]


@pytest.mark.parametrize("name", [*DENSE, *MIXTURES, *(name for name in BRIDGED if name in WITH_TABLES)])
def test_names_and_shapes_are_those_of_transformers(name: str) -> None:

    from dagrl.model_files.library_model import library_shapes

    config = tiny_hf_model(name).config
    fields: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    assert dict(published_tensors(shape_of(fields))) == dict(library_shapes(config))


@pytest.mark.parametrize("family", WITH_TABLES)
def test_fields_that_a_config_leaves_out_are_those_of_its_class(family: str) -> None:
    from transformers import CONFIG_MAPPING

    from dagrl.model_files.library_model import library_shapes

    # The defaults of some classes are models of thousands of tensors.
    few = {"num_hidden_layers": 2}
    if family in ("deepseek_v3", "glm4_moe"):
        few |= {"first_k_dense_replace": 1, "n_routed_experts": 8}
    if family == "nemotron":
        # Transformers cannot build it without.
        few |= {"num_key_value_heads": 8}
    # Its class does not move fields to where they belong.
    config = CONFIG_MAPPING[family](**({"text_config": few} if family in ("qwen3_vl", "qwen3_5") else few))
    assert dict(published_tensors(shape_of({"model_type": family, **few}))) == dict(library_shapes(config))


def test_layers_behind_the_models_own_predict_further_tokens() -> None:
    names = ["model.layers.3.mlp.gate.weight", "model.layers.4.eh_proj.weight", "model.layers.5.eh_proj.weight"]
    assert [is_prediction_layer(name, 4, 1) for name in (*names, "model.norm.weight")] == [False, True, False, False]
    assert is_prediction_layer("mtp.fc.weight", 4, 0)
