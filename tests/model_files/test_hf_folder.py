"""Hugging Face folders as transformers reads them."""

import json
from pathlib import Path
from typing import Any

import pytest

from dagrl.config.schema import ModelSpec


@pytest.fixture(scope="module")
def model() -> Any:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        "llama", hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, vocab_size=30
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


@pytest.mark.parametrize("shard_bytes", [10**9, 2000], ids=["one-file", "shards"])
def test_transformers_loads_it_to_the_bit(model: Any, tmp_path: Path, shard_bytes: int) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    from dagrl.model_files.hf_folder import write_hf_folder

    weights = [(name, tensor.detach()) for name, tensor in model.named_parameters()]
    write_hf_folder(tmp_path, model.config, "LlamaForCausalLM", weights, shard_bytes)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded).__name__ == "LlamaForCausalLM"
    found = dict(loaded.named_parameters())
    assert found.keys() == dict(weights).keys()
    for name, tensor in weights:
        assert found[name].dtype is torch.bfloat16
        assert torch.equal(found[name], tensor), name
    files = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    if shard_bytes > 2000:
        assert files == ["model.safetensors"]
        return
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert len(files) > 2
    assert set(index["weight_map"].values()) == set(files)
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for _, tensor in weights)


@pytest.mark.parametrize(("names", "left"), [([], 0), (["model.layers.2.enorm.weight"], 1)], ids=["without", "with"])
def test_a_config_promises_no_layers_that_are_not_written(
    model: Any, tmp_path: Path, names: list[str], left: int
) -> None:
    """Layers that predict further tokens, behind the two of the model."""
    import copy

    import torch

    from dagrl.model_files.hf_folder import write_hf_folder

    config = copy.deepcopy(model.config)
    config.num_nextn_predict_layers = 1
    weights = [("model.norm.weight", torch.ones(16)), *((name, torch.ones(16)) for name in names)]
    write_hf_folder(tmp_path, config, "LlamaForCausalLM", weights)
    assert json.loads((tmp_path / "config.json").read_text())["num_nextn_predict_layers"] == left
    assert config.num_nextn_predict_layers == 1, "the caller's config stays"
    write_hf_folder(tmp_path, model.config, "LlamaForCausalLM", weights)
    assert "num_nextn_predict_layers" not in json.loads((tmp_path / "config.json").read_text())


def test_a_config_of_quantised_weights_promises_none(model: Any, tmp_path: Path) -> None:
    import copy

    import torch

    from dagrl.model_files.hf_folder import write_hf_folder

    config = copy.deepcopy(model.config)
    config.quantization_config = {"quant_method": "fp8"}
    write_hf_folder(tmp_path, config, "LlamaForCausalLM", [("model.norm.weight", torch.ones(16))])
    assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text())
    assert config.quantization_config, "the caller's config stays"


def test_tokenizer_and_generation_config_are_copied_unchanged(tmp_path: Path) -> None:
    from dagrl.model_files.hf_folder import copy_tokenizer

    source, other, target = tmp_path / "source", tmp_path / "other", tmp_path / "target"
    for folder in (source, other, target):
        folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "README.md", "pytorch_model.bin"):
        (source / name).write_text(f"{name} of the model")
    (other / "tokenizer.json").write_text("another")
    copy_tokenizer(ModelSpec(path=source), target)
    assert sorted(path.name for path in target.iterdir()) == [
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert (target / "tokenizer.json").read_text() == "tokenizer.json of the model"
    copy_tokenizer(ModelSpec(path=source, tokenizer=other), target)
    assert (target / "tokenizer.json").read_text() == "another"


@pytest.mark.parametrize(
    "name", ["tiktoken.model", "tekken.json", "spiece.model", "additional_chat_templates/tool_use.jinja"]
)
def test_tokenizers_in_other_formats_come_along(tmp_path: Path, name: str) -> None:
    from dagrl.model_files.hf_folder import copy_tokenizer

    source, target = tmp_path / "source", tmp_path / "target"
    target.mkdir()
    (source / name).parent.mkdir(parents=True)
    (source / name).write_text("a part of the tokenizer")
    copy_tokenizer(ModelSpec(path=source), target)
    assert (target / name).read_text() == "a part of the tokenizer"


def test_a_made_tokenizer_is_loadable_again(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    from dagrl.config.schema import TokenizerSpec
    from dagrl.model_files.hf_folder import copy_tokenizer
    from dagrl.model_files.tokenizer import make_tokenizer

    spec = TokenizerSpec(kind="characters", alphabet="0123+=")
    copy_tokenizer(ModelSpec(init={}, tokenizer=spec), tmp_path)
    loaded, made = AutoTokenizer.from_pretrained(tmp_path), make_tokenizer(spec)
    assert loaded("12+3=")["input_ids"] == made("12+3=")["input_ids"]
    assert (loaded.eos_token_id, loaded.pad_token_id) == (made.eos_token_id, made.pad_token_id)
