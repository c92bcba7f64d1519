"""A model's config and start weights: read from a folder, or made from a description; wrong ones explained."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dagrl.backends.runtime.initial_weights import published_shapes, weight_source
from dagrl.config.schema import ModelSpec
from dagrl.model_files.library_model import load_hf_config, published_tensors
from dagrl.model_files.stored_weights import check_finite

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


def split_into_two_files(folder: Path) -> dict[str, str]:
    """Replace the single file by two and an index; the file that each tensor went to."""
    single = folder / "model.safetensors"
    tensors = load_file(single)
    single.unlink()
    file_of = {name: f"model-{1 + index % 2}-of-2.safetensors" for index, name in enumerate(tensors)}
    for file in set(file_of.values()):
        save_file({name: tensor for name, tensor in tensors.items() if file_of[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": file_of}))
    return file_of


# -- config -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("files", [1, 2])
def test_weights_of_a_folder_are_read_by_name(folder: Path, files: int):
    stored = load_file(folder / "model.safetensors")
    if files == 2:
        split_into_two_files(folder)
    source = weight_source(ModelSpec(path=folder), seed=0)
    assert sorted(source.names()) == sorted(stored)
    for name, tensor in stored.items():
        assert torch.equal(source.get(name), tensor)
        assert source.shape(name) == tuple(tensor.shape)


def test_a_tied_output_layer_in_the_file_is_not_listed(folder: Path):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    assert "lm_head.weight" in load_file(folder / "model.safetensors")
    assert "lm_head.weight" not in weight_source(ModelSpec(path=folder), seed=0).names()


def test_a_missing_tensor_is_named_with_its_folder(folder: Path):
    source = weight_source(ModelSpec(path=folder), seed=0)
    for ask in (source.get, source.shape):
        with pytest.raises(ValueError, match=f"{folder} has no tensor 'model.norm.bias'"):
            ask("model.norm.bias")


def test_a_missing_file_is_named_with_what_it_held(folder: Path):
    file_of = split_into_two_files(folder)
    lost = folder / file_of["model.norm.weight"]
    lost.unlink()
    count = list(file_of.values()).count(lost.name)
    with pytest.raises(ValueError, match=f"{lost} is missing: .* holds {count} tensors"):
        weight_source(ModelSpec(path=folder), seed=0)


def test_a_folder_without_weights_is_named(folder: Path):
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"has neither model.safetensors nor model.safetensors.index.json"):
        weight_source(ModelSpec(path=folder), seed=0)


@pytest.mark.parametrize("files", [1, 2])
def test_a_file_that_was_cut_off_is_named(folder: Path, files: int):
    if files == 2:
        split_into_two_files(folder)
    broken = min(folder.glob("*.safetensors"))
    broken.write_bytes(broken.read_bytes()[:-100])
    with pytest.raises(ValueError, match=f"cannot read .*{broken}.*copy the file again"):
        source = weight_source(ModelSpec(path=folder), seed=0)
        for name in source.names():
            source.get(name)


# -- random weights ---------------------------------------------------------------------------------------------------


def test_random_weights_do_not_depend_on_the_order_in_which_they_are_asked_for():
    forth, back = weight_source(described(), seed=3), weight_source(described(), seed=3)
    tensors = {name: forth.get(name) for name in forth.names()}
    for name in reversed(back.names()):
        assert torch.equal(back.get(name), tensors[name]), name


def test_each_seed_and_each_tensor_has_its_own_random_weights():
    query, other = (f"model.layers.{layer}.self_attn.q_proj.weight" for layer in (0, 1))
    source = weight_source(described(), seed=3)
    assert not torch.equal(source.get(query), source.get(other))
    assert not torch.equal(source.get(query), weight_source(described(), seed=4).get(query))


def test_random_weights_are_those_of_a_fresh_model():
    source = weight_source(described(model_type="qwen2", initializer_range=0.1), seed=0)
    names = source.names()
    assert len(names) == 2 + 12 * 2 + 1
    for name in names:
        tensor = source.get(name)
        assert tuple(tensor.shape) == source.shape(name)
        if tensor.dim() == 2:
            assert tensor.std().item() == pytest.approx(0.1, rel=0.1)
            assert abs(tensor.mean().item()) < 0.01
        else:
            assert (tensor == (0.0 if name.endswith("bias") else 1.0)).all()


@pytest.mark.parametrize("tied", [True, False])
def test_random_weights_fill_the_hugging_face_model(tied: bool):
    from transformers import AutoModelForCausalLM

    model = described(tie_word_embeddings=tied)
    source = weight_source(model, seed=0)
    built = AutoModelForCausalLM.from_config(load_hf_config(model))
    missing, unexpected = built.load_state_dict({name: source.get(name) for name in source.names()}, strict=False)
    assert (missing, unexpected) == (["lm_head.weight"] if tied else [], [])


MIXTURES = {
    "qwen3_moe": ({"num_experts": 3, "moe_intermediate_size": 24}, "mlp.experts.{}.gate_proj.weight"),
    "mixtral": ({"num_local_experts": 3}, "block_sparse_moe.experts.{}.w1.weight"),
    "deepseek_v3": (
        {"n_routed_experts": 3, "moe_intermediate_size": 24, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 0},
        "mlp.experts.{}.gate_proj.weight",
    ),
}


@pytest.mark.parametrize("family", MIXTURES)
def test_every_expert_has_its_own_name_and_random_weights(family: str):
    fields, expert = MIXTURES[family]
    source = weight_source(described(model_type=family, **fields), seed=3)
    first, second = (source.get(f"model.layers.1.{expert.format(number)}") for number in (0, 2))
    assert first.shape == second.shape and first.dim() == 2
    assert not torch.equal(first, second)
    assert f"model.layers.1.{expert.format(3)}" not in source.names()
    assert not any("gate_up_proj" in name for name in source.names())


@pytest.mark.parametrize("family", MIXTURES)
def test_names_are_those_that_transformers_itself_saves(family: str, tmp_path: Path):
    from transformers import AutoModelForCausalLM

    config = load_hf_config(described(model_type=family, **MIXTURES[family][0]))
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    assert published_shapes(config) == {name: tuple(tensor.shape) for name, tensor in saved.items()}
    published = published_tensors(model)
    assert published.keys() == saved.keys()
    assert all(torch.equal(published[name], tensor) for name, tensor in saved.items())


def test_published_tensors_are_views_into_the_model():
    from transformers import AutoModelForCausalLM

    config = load_hf_config(described(model_type="mixtral", num_local_experts=3))
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for number, name in enumerate(("w1", "w3")):
            published_tensors(model)[f"model.layers.0.block_sparse_moe.experts.2.{name}.weight"].fill_(number + 7)
    gate, up = model.model.layers[0].mlp.experts.gate_up_proj[2].chunk(2)
    assert (gate == 7).all() and (up == 8).all()


def test_a_bias_of_a_router_starts_at_zero():
    source = weight_source(described(model_type="deepseek_v3", **MIXTURES["deepseek_v3"][0]), seed=3)
    assert not source.get("model.layers.1.mlp.gate.e_score_correction_bias").any()
    assert source.get("model.layers.1.mlp.gate.weight").all()


def test_a_score_head_is_drawn_on_request_and_not_among_the_names():
    source = weight_source(described(initializer_range=0.1), seed=3)
    assert "score.weight" not in source.names()
    assert source.get("score.weight").shape == source.shape("score.weight") == (1, 64)
    assert source.get("score.weight").std().item() == pytest.approx(0.1, rel=0.4)


def test_a_tensor_that_the_model_does_not_have_is_named():
    with pytest.raises(ValueError, match=r"a qwen3 model has no tensor 'model.norm.bias'"):
        weight_source(described(), seed=0).get("model.norm.bias")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_weights_that_are_no_numbers_are_named_where_they_are_read(folder: Path, value: float, dtype: torch.dtype):
    file = folder / "model.safetensors"
    tensors = {name: tensor.to(dtype) for name, tensor in load_file(file).items()}
    tensors["model.norm.weight"][3] = value
    save_file(tensors, file)
    source = weight_source(ModelSpec(path=folder), seed=0)
    for name in tensors:
        if name != "model.norm.weight":
            assert torch.equal(source.get(name), tensors[name])
    with pytest.raises(
        ValueError, match=rf"{file}: tensor 'model.norm.weight' \[64\] has NaN or infinite values; copy"
    ):
        source.get("model.norm.weight")


@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.float8_e4m3fn, torch.bool])
def test_weights_in_a_dtype_that_is_not_trained_are_named(folder: Path, dtype: torch.dtype):
    file = folder / "model.safetensors"
    save_file({name: tensor.to(dtype) for name, tensor in load_file(file).items()}, file)
    kind = str(dtype).removeprefix("torch.")
    with pytest.raises(
        ValueError, match=rf"{file}: tensor 'model.norm.weight' \[64\] is {kind}; weights must be 16- to"
    ):
        weight_source(ModelSpec(path=folder), seed=0).get("model.norm.weight")


def test_quantised_weights_are_refused(folder: Path):
    config = json.loads((folder / "config.json").read_text())
    quantised = config | {"quantization_config": {"quant_method": "gptq", "bits": 4}}
    (folder / "config.json").write_text(json.dumps(quantised))
    with pytest.raises(ValueError, match=rf"{folder / 'config.json'} says that the weights are quantised"):
        weight_source(ModelSpec(path=folder), seed=0)


def test_an_empty_tensor_is_finite():
    check_finite(torch.empty(0), "nowhere")
