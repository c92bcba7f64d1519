"""The table of Megatron's fields fits every family, and Megatron's classes get what a file says."""

import dataclasses

import pytest
import torch
import transformers

from dagrl.backends.families.registry import buildable, family_names, find_family
from dagrl.backends.families.sizes import sizes_of
from dagrl.backends.megatron.engine.config import arguments_of, build_config, transformer_fields
from dagrl.backends.megatron.fields import TransformerFields

# After the package that patches torch on machines without CUDA.
from megatron.core.optimizer import OptimizerConfig  # isort: skip
from megatron.core.transformer.transformer_config import MLATransformerConfig  # isort: skip


@pytest.mark.parametrize("name", family_names())
def test_fixed_fields_of_a_family_are_refused_and_defaults_are_in_the_table(name):
    config, family = transformers.AutoConfig.for_model(name), find_family(name)
    fixed = family.transformer_fields(buildable(config.to_dict())[1]) if family.bridged else transformer_fields(config)
    # Others are of megatron-bridge's providers alone.
    megatrons = {field.name for field in dataclasses.fields(MLATransformerConfig)}
    assert set(fixed) & megatrons <= set(TransformerFields.refused)
    assert set(family.transformer_defaults) <= set(TransformerFields.model_fields)


@pytest.mark.parametrize("family", [name for name in family_names() if not find_family(name).bridged])
def test_sizes_are_those_that_the_engine_builds_with(family):
    """Of Hugging Face's default config of each family, written out as a checkpoint has it."""
    config = transformers.AutoConfig.for_model(family)
    sizes, fields = sizes_of(config.to_dict()), transformer_fields(config)
    read = {
        "num_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "num_query_groups": sizes.key_value_heads,
        "ffn_hidden_size": sizes.dense_width,
        "num_moe_experts": sizes.experts,
        "moe_ffn_hidden_size": sizes.expert_width,
        "moe_shared_expert_intermediate_size": sizes.shared_width,
    }
    for name, size in read.items():
        assert size is None or size.value == fields[name], name
    assert sizes.mixture == (fields["num_moe_experts"] is not None)
    assert (sizes.experts is None) == (not sizes.mixture)
    assert sizes.latent_attention == ("kv_lora_rank" in fields)


@pytest.mark.parametrize("name", ["bf16", "bfloat16"])
def test_number_formats_have_the_names_of_megatrons_command_line_and_of_torch(name):
    fields = arguments_of(OptimizerConfig, "optimizer", {"exp_avg_dtype": name}, defaults={}, fixed={})
    assert fields == {"exp_avg_dtype": torch.bfloat16}


def test_fixed_values_prevail_and_given_ones_over_defaults():
    given, defaults, fixed = {"lr": 0.1, "bf16": True}, {"lr": 0.2, "clip_grad": 0.5}, {"bf16": False}
    fields = arguments_of(OptimizerConfig, "optimizer", given, defaults=defaults, fixed=fixed)
    assert fields == {"lr": 0.1, "clip_grad": 0.5, "bf16": False}


def test_fields_that_megatron_does_not_have_or_refuses():
    with pytest.raises(ValueError, match=r"optimizer\.clip_gard: .*did you mean `clip_grad`"):
        arguments_of(OptimizerConfig, "optimizer", {"clip_gard": 1.0}, defaults={}, fixed={})
    with pytest.raises(ValueError, match=r"^optimizer: Megatron rejects these fields: "):
        build_config(OptimizerConfig, "optimizer", {"use_precision_aware_optimizer": True, "optimizer": "sgd"})
