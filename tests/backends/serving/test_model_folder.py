"""The folder that a server reads its model from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dagrl.backends.runtime.initial_weights import weight_source
from dagrl.backends.serving.model_folder import model_folder
from dagrl.config.fp8_weights import Fp8Weights
from dagrl.config.schema import ModelSpec, TokenizerSpec

MODEL = ModelSpec(
    init={"model_type": "qwen3", "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "head_dim": 8},
    tokenizer=TokenizerSpec(kind="characters", alphabet="01"),
)


def test_a_models_own_folder_is_read_where_it_is(tmp_path: Path) -> None:
    assert model_folder(ModelSpec(path=tmp_path / "mine"), tmp_path, seed=0, with_weights=True) == tmp_path / "mine"
    assert not list(tmp_path.iterdir())


def test_a_follower_needs_a_config_alone(tmp_path: Path) -> None:
    assert model_folder(MODEL, tmp_path, seed=0, with_weights=False) == tmp_path
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForCausalLM"]
    assert (config["hidden_size"], config["vocab_size"], config["eos_token_id"]) == (16, 5, 1)


def test_random_start_weights_are_those_of_every_other_engine(tmp_path: Path) -> None:
    model_folder(MODEL, tmp_path, seed=7, with_weights=True)
    source = weight_source(MODEL, 7)
    written = load_file(tmp_path / "model.safetensors")
    assert sorted(written) == sorted(source.names())
    assert all(torch.equal(written[name], source.get(name)) for name in written)


def test_a_model_that_is_no_language_model_is_refused(tmp_path: Path) -> None:
    model = ModelSpec(init={"model_type": "vit"}, tokenizer=MODEL.tokenizer)
    with pytest.raises(ValueError, match="vit"):
        model_folder(model, tmp_path, seed=0, with_weights=False)


def test_a_server_of_weights_in_fp8_has_the_config_of_such_a_model(tmp_path: Path) -> None:
    drawn, copied = tmp_path / "drawn", tmp_path / "copied"
    for folder in (drawn, copied):
        folder.mkdir()
    fp8 = Fp8Weights("block")
    model_folder(MODEL, drawn, seed=0, with_weights=False, fp8=fp8)
    config = json.loads((drawn / "config.json").read_text())
    assert config["quantization_config"]["weight_block_size"] == [128, 128]
    assert config["quantization_config"]["modules_to_not_convert"] == ["model.embed_tokens", "lm_head"]
    # A folder's other files stay, its weights do not.
    own = tmp_path / "own"
    own.mkdir()
    model_folder(MODEL, own, seed=0, with_weights=True)
    (own / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    assert model_folder(ModelSpec(path=own), copied, seed=0, with_weights=False, fp8=fp8) == copied
    assert {path.name for path in copied.iterdir()} == {"config.json", "generation_config.json"}
    assert (copied / "generation_config.json").read_text() == '{"eos_token_id": [1, 2]}'
    written = json.loads((copied / "config.json").read_text())
    assert written.pop("quantization_config") == config["quantization_config"]
    assert written == json.loads((own / "config.json").read_text())
