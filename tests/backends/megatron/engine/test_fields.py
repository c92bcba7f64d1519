"""The engine and `dagrl validate` go by one table of what clashes, for every family."""

import pytest
import torch
import transformers
from megatron.core.optimizer import OptimizerConfig

from dagrl.backends.families.registry import family_names, find_family
from dagrl.backends.families.sizes import sizes_of
from dagrl.backends.megatron.engine.config import transformer_fields
from dagrl.backends.megatron.engine.fields import join_fields, refuse_clashes
from dagrl.backends.megatron.section import MegatronEngineSpec
from dagrl.backends.megatron.unsupported import CLASHES, fields_from_the_model


def test_every_clash_is_a_line_with_its_reason():
    spec = MegatronEngineSpec(
        backend="megatron",
        group="train",
        transformer={"tp_comm_overlap": True, "attention_dropout": 0.1, "moe_aux_loss_coeff": 0.1},
        ddp={"average_in_collective": True},
    )
    with pytest.raises(ValueError) as caught:
        refuse_clashes(spec)
    lines = str(caught.value).splitlines()
    assert [line.partition(": ")[0] for line in lines] == [
        "transformer.tp_comm_overlap",
        "transformer.attention_dropout",
        "ddp.average_in_collective",
    ]
    assert "packs vary in length" in lines[0]


def test_an_engine_without_a_clash_passes():
    refuse_clashes(MegatronEngineSpec(backend="megatron", group="train", optimizer={"lr": 1e-6}))


@pytest.mark.parametrize("family", family_names())
def test_what_a_family_fixes_is_refused_and_what_it_suggests_is_not(family):
    config = transformers.AutoConfig.for_model(family)
    told = {field for clash in CLASHES["transformer"] for field in clash.fields}
    assert set(transformer_fields(config)) <= told
    assert not set(find_family(family).transformer_defaults) & fields_from_the_model()


@pytest.mark.parametrize("family", family_names())
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
    fields = join_fields(OptimizerConfig, "optimizer", {"exp_avg_dtype": name}, defaults={}, fixed=())
    assert fields == {"exp_avg_dtype": torch.bfloat16}
