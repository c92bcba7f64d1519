"""The built model computes what Hugging Face computes, tensor-parallel too; what cannot be built is refused."""

import copy
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from packs import LENGTHS, run_packed, sequences


@pytest.mark.parametrize("layout", [(1,), (2,), (2, True)], ids=["tp1", "tp2", "tp2-sequence-parallel"])
def test_logits_of_a_pack_are_those_of_each_sequence_alone(run_ranks, load_chunks, megatron_spec, hf_model, layout):
    spec = megatron_spec(*layout)
    rows = sequences(hf_model.config.vocab_size)

    def on_rank(rank: int) -> Any:
        from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

        with torch.no_grad():
            logits = run_packed(load_chunks(hf_model, spec)[0], rows)
            return gather_from_tensor_model_parallel_region(logits).numpy()

    with torch.no_grad():
        alone = torch.cat([hf_model(row[None]).logits[0] for row in rows])
    for logits in run_ranks(layout[0], on_rank):
        assert logits.shape == (sum(LENGTHS), 64), "59 tokens, and padding that every layout shares"
        torch.testing.assert_close(torch.from_numpy(logits[:, :59]), alone, atol=5e-6, rtol=0)


def test_transformer_fields_pass_through_by_name(run_ranks, megatron_spec, qwen3):
    from megatron.core.transformer.enums import AttnBackend

    from dagrl.backends.megatron.engine.config import transformer_config

    config = transformer_config(
        qwen3.config,
        megatron_spec(2, True, recompute_modules=["mlp"], attention_backend="flash", bf16=True),
    )
    assert config.recompute_modules == ["mlp"]
    assert config.attention_backend is AttnBackend.flash
    assert config.params_dtype == config.pipeline_dtype == torch.bfloat16
    assert config.sequence_parallel and config.tensor_model_parallel_size == 2
    assert config.hidden_dropout == config.attention_dropout == 0.0


def test_fp8_reaches_all_of_megatrons_configs(run_ranks, megatron_spec, qwen3):
    from dagrl.backends.megatron.engine.config import transformer_config
    from dagrl.backends.megatron.engine.optimizer import ddp_config, optimizer_config

    for fields, recipe in (({}, "blockwise"), ({"fp8_recipe": "delayed"}, "delayed")):
        spec = megatron_spec(fp8="hybrid", bf16=True, **fields)
        config = transformer_config(qwen3.config, spec)
        assert (config.fp8, config.fp8_recipe, config.fp8_param) == ("hybrid", recipe, False)
        assert config.disable_parameter_transpose_cache, "no weights in fp8 stay in a sleep"
        assert optimizer_config(spec, torch.bfloat16).fp8_recipe == recipe
        assert not ddp_config(spec).fp8_param_gather
    plain = megatron_spec(bf16=True)
    assert transformer_config(qwen3.config, plain).fp8 is None
    assert optimizer_config(plain, torch.bfloat16).fp8_recipe is None


def test_settings_that_megatron_refuses_are_user_errors(run_ranks, megatron_spec, qwen3):
    from dagrl.backends.megatron.engine.config import transformer_config

    with pytest.raises(ValueError, match=r"^transformer: Megatron rejects these fields: .*recompute_method"):
        transformer_config(qwen3.config, megatron_spec(recompute_granularity="full"))


def test_a_layout_that_does_not_divide_the_model_is_refused(run_ranks, megatron_spec, qwen3):
    from dagrl.backends.megatron.engine.config import transformer_config

    with pytest.raises(ValueError, match=r"num_attention_heads \(4\) must be a multiple of tensor_model_parallel_size"):
        transformer_config(qwen3.config, megatron_spec(3))
    keys = copy.deepcopy(qwen3.config)
    keys.num_attention_heads, keys.num_key_value_heads = 6, 3
    with pytest.raises(ValueError, match=r"num_query_groups \(3\) must be a multiple or divisor of tensor_model_par"):
        transformer_config(keys, megatron_spec(2))
    keys.num_attention_heads, keys.num_key_value_heads, keys.head_dim = 4, 1, 2
    transformer_config(keys, megatron_spec(2))


def test_stages_send_packs_of_any_length(run_ranks, megatron_spec, qwen3):
    from dagrl.backends.megatron.engine.config import transformer_config

    assert not transformer_config(qwen3.config, megatron_spec()).variable_seq_lengths
    config = transformer_config(qwen3.config, megatron_spec(pp=2, num_layers_in_first_pipeline_stage=1))
    assert config.variable_seq_lengths and config.num_layers_in_first_pipeline_stage == 1
    interleaved = transformer_config(qwen3.config, megatron_spec(pp=2, vpp=1))
    assert interleaved.overlap_p2p_comm and not interleaved.batch_p2p_comm


def test_virtual_stages_of_a_layout_are_those_of_the_parallel_section(run_ranks, megatron_spec, qwen3):
    from dagrl.backends.megatron.engine.config import transformer_config

    layout = {"pipeline_model_parallel_layout": "Et|t|t|tL"}
    with pytest.raises(ValueError, match="pipeline_model_parallel_layout: it has 2 virtual stages"):
        transformer_config(qwen3.config, megatron_spec(pp=2, **layout))


@given(vocab_size=st.integers(1, 300_000), ranks=st.integers(1, 16))
def test_a_padded_vocabulary_holds_all_tokens_and_divides(vocab_size: int, ranks: int):
    from dagrl.backends.megatron.section import padded_vocab_size

    padded = padded_vocab_size(vocab_size, ranks)
    assert padded >= vocab_size
    assert padded % ranks == 0
    assert padded - vocab_size < ranks * (1024 if vocab_size >= 16384 else 8)
    if ranks in (1, 2, 4, 8):
        assert padded == padded_vocab_size(vocab_size, 1), "a checkpoint fits other numbers of ranks"
