import re
from collections.abc import Iterator

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from dagrl.backends.hf.weights import replace_weights
from dagrl.backends.runtime.initial_weights import RandomWeights
from dagrl.config.schema import ModelSpec
from dagrl.model_files.library_model import load_hf_config

EMBEDDING, OUTPUT, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"


@pytest.fixture
def untied(model: ModelSpec) -> PreTrainedModel:
    return AutoModelForCausalLM.from_config(load_hf_config(model), dtype=torch.float32)


@pytest.fixture
def tied(tied_model: ModelSpec) -> PreTrainedModel:
    return AutoModelForCausalLM.from_config(load_hf_config(tied_model), dtype=torch.float32)


def fresh_weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(tensor.shape, generator=generator) for name, tensor in model.named_parameters()}


def test_all_weights_are_replaced(untied: PreTrainedModel) -> None:
    weights = fresh_weights(untied)
    replace_weights(untied, weights.items())
    assert all(torch.equal(tensor, weights[name]) for name, tensor in untied.named_parameters())


def test_the_model_keeps_its_dtype(untied: PreTrainedModel) -> None:
    weights = fresh_weights(untied)
    replace_weights(untied, ((name, tensor.bfloat16()) for name, tensor in weights.items()))
    assert all(tensor.dtype == torch.float32 for tensor in untied.parameters())
    assert torch.equal(untied.get_parameter(NORM), weights[NORM].bfloat16().float())


@pytest.mark.parametrize("names", [[EMBEDDING], [OUTPUT], [EMBEDDING, OUTPUT]])
def test_tied_embeddings_may_come_under_either_name(tied: PreTrainedModel, names: list[str]) -> None:
    weights = fresh_weights(tied)
    embedding = weights.pop(EMBEDDING)
    replace_weights(tied, [*weights.items(), *((name, embedding) for name in names)])
    assert torch.equal(tied.get_input_embeddings().weight, embedding)
    assert torch.equal(tied.get_output_embeddings().weight, embedding)


@pytest.mark.parametrize(
    ("family", "experts", "example"),
    [
        ("qwen3_moe", {"num_experts": 3}, "model.layers.1.mlp.experts.2.up_proj.weight"),
        ("mixtral", {"num_local_experts": 3}, "model.layers.1.block_sparse_moe.experts.2.w3.weight"),
    ],
)
def test_experts_come_one_by_one_as_checkpoints_name_them(family: str, experts: dict[str, int], example: str) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 24, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = AutoConfig.for_model(family, vocab_size=16, **experts, **sizes, **heads)
    model, source = AutoModelForCausalLM.from_config(config, dtype=torch.float32), RandomWeights(config, seed=2)
    assert example in source.names()
    replace_weights(model, ((name, source.get(name)) for name in source.names()))
    up = model.model.layers[1].mlp.experts.gate_up_proj[2].chunk(2)[1]
    assert torch.equal(up, source.get(example))
    missing = [(name, source.get(name)) for name in source.names() if name != example]
    with pytest.raises(ValueError, match=f"missing: {re.escape(example)}"):
        replace_weights(model, missing)


def test_tied_embeddings_that_differ_are_refused(tied: PreTrainedModel) -> None:
    weights = fresh_weights(tied)
    assert_refused(
        tied,
        [*weights.items(), (OUTPUT, weights[EMBEDDING] + 1)],
        f"tied in this model but not equal: {EMBEDDING} and {OUTPUT}",
    )


def test_every_fault_is_named(untied: PreTrainedModel) -> None:
    weights = fresh_weights(untied)
    shape = list(weights[OUTPUT].shape)
    del weights[EMBEDDING]
    weights["model.extra"] = torch.zeros(2)
    weights[OUTPUT] = weights[OUTPUT].T
    assert_refused(
        untied,
        [*weights.items(), (NORM, weights[NORM])],
        f"unknown: model.extra; doubled: {NORM}; missing: {EMBEDDING}; "
        f"of the wrong shape: {OUTPUT} ({shape[::-1]}, not {shape})",
    )


def test_many_missing_names_are_counted(untied: PreTrainedModel) -> None:
    names = list(fresh_weights(untied))
    assert_refused(untied, [], f"missing: {', '.join(names[:5])} and {len(names) - 5} more")


def assert_refused(model: PreTrainedModel, weights: list[tuple[str, torch.Tensor]], message: str) -> None:
    before = {name: tensor.clone() for name, tensor in model.named_parameters()}
    with pytest.raises(ValueError, match=re.escape(message)):
        replace_weights(model, weights)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.named_parameters())


def test_a_sender_that_fails_midway_changes_nothing(untied: PreTrainedModel) -> None:
    before = {name: tensor.clone() for name, tensor in untied.named_parameters()}

    def breaking_off() -> Iterator[tuple[str, torch.Tensor]]:
        yield EMBEDDING, torch.zeros_like(untied.get_parameter(EMBEDDING))
        raise ConnectionError("the sender is gone")

    with pytest.raises(ConnectionError):
        replace_weights(untied, breaking_off())
    assert all(torch.equal(tensor, before[name]) for name, tensor in untied.named_parameters())
