"""A model's config and start weights: read from a folder, or made from a description; wrong ones explained."""

import dataclasses
import json
import pickle
from pathlib import Path

import pytest

from dagrl.backends.families.registry import family_names
from dagrl.config.schema import ModelSpec
from dagrl.model_files.library_classes import UNDECLARED, config_class
from dagrl.model_files.library_model import load_hf_config

SHAPE = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def described(**fields) -> ModelSpec:
    """A model of random weights over 3 special tokens and 10 digits."""
    tokenizer = {"kind": "characters", "alphabet": "0123456789"}
    return ModelSpec.model_validate({"init": SHAPE | fields, "tokenizer": tokenizer})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A Hugging Face folder with a single file of weights."""
    from transformers import AutoModelForCausalLM

    config = load_hf_config(described())
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    return tmp_path


def test_vocabulary_and_special_tokens_are_the_tokenizers():
    config = load_hf_config(described())
    assert (config.vocab_size, config.pad_token_id, config.eos_token_id, config.bos_token_id) == (13, 0, 1, None)


def test_the_description_overrides_the_tokenizer():
    config = load_hf_config(described(vocab_size=16, eos_token_id=5))
    assert (config.vocab_size, config.eos_token_id) == (16, 5)


def test_the_older_name_of_the_rotation_base_is_understood():
    assert load_hf_config(described(rope_theta=5e5)).rope_parameters == {"rope_type": "default", "rope_theta": 5e5}


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"model_type": "qwen33"}, r"^model.init.model_type: 'qwen33' is not a model type .*; did you mean 'qwen3'\?$"),
        ({"hiden_size": 64}, r"^model.init.hiden_size: Qwen3Config has no such field; did you mean 'hidden_size'\?$"),
        ({"hidden_size": "big"}, r"^model.init is no valid Qwen3Config: .*'hidden_size' expected int, got str"),
    ],
    ids=["model-type", "field", "value"],
)
def test_a_wrong_description_is_explained(fields, complaint):
    with pytest.raises(ValueError, match=complaint):
        load_hf_config(described(**fields))


def test_a_folder_has_its_own_config(folder: Path):
    config = load_hf_config(ModelSpec(path=folder))
    assert (config.model_type, config.hidden_size, config.vocab_size) == ("qwen3", 64, 13)


def test_a_folder_without_a_config_is_named(tmp_path: Path):
    with pytest.raises(ValueError, match=f"{tmp_path} has no config.json"):
        load_hf_config(ModelSpec(path=tmp_path))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"cannot read .*config.json"):
        load_hf_config(ModelSpec(path=tmp_path))


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("num_attention_heads", None, r"config.json is no valid config: .*'num_attention_heads' expected int"),
        ("rope_scaling", "linear", r"config.json is no valid config: .*'rope_parameters' with value 'linear'"),
        ("torch_dtype", "bf16", r"cannot read .*config.json: module 'torch' has no attribute 'bf16'"),
        ("id2label", {"one": "a"}, r"cannot read .*config.json: invalid literal"),
    ],
)
def test_a_config_that_transformers_refuses_is_an_error_that_processes_can_send(tmp_path, field, value, message):
    (tmp_path / "config.json").write_text(json.dumps({**SHAPE, field: value}))
    with pytest.raises(ValueError, match=message) as caught:
        load_hf_config(ModelSpec(path=tmp_path))
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_code_of_a_folder_is_refused_without_a_question(folder: Path, monkeypatch: pytest.MonkeyPatch):
    """Also where transformers asks, with a person at the terminal who says yes."""
    monkeypatch.setattr("builtins.input", lambda _: "y")
    mark = folder / "was_here"
    (folder / "code.py").write_text(f"open({str(mark)!r}, 'w')\n")
    for auto_map in ({"AutoConfig": "code.Own"}, {"AutoConfig": f"{folder}--code.Own"}):
        (folder / "config.json").write_text(json.dumps({"model_type": "own", "auto_map": auto_map}))
        with pytest.raises(ValueError, match=r"cannot read .*config.json: it needs Python code .* not run"):
            load_hf_config(ModelSpec(path=folder))
    assert not mark.exists()


def test_a_model_from_nowhere_is_refused():
    with pytest.raises(ValueError, match=r"model: give either path .* or init"):
        load_hf_config(ModelSpec())


# -- weights in files -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", family_names())
def test_fields_that_the_checks_read_as_text_are_those_of_the_class(model_type):
    from transformers import CONFIG_MAPPING

    expected = CONFIG_MAPPING[model_type]
    class_name, known, _ = config_class(model_type)
    assert class_name == expected.__name__
    # A model that sees has the fields of its language model beside its own.
    parts = [expected, *(each for name, each in expected.sub_configs.items() if name == "text_config")]
    assert known.keys() == {field.name for part in parts for field in dataclasses.fields(part)} | set(UNDECLARED)
