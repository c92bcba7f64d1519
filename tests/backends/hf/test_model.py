"""Mixtures of any sizes generate and score; aligned ones keep transformers' grouped product."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from dagrl.backends.backend import RankContext
from dagrl.backends.hf.classifier import HfClassifier
from dagrl.backends.hf.model import avoid_misaligned_grouped_mm
from dagrl.backends.hf.section import HfEngineSpec
from dagrl.backends.runtime.initial_weights import weight_source
from dagrl.config.schema import ModelSpec, SamplingSpec, TokenizerSpec
from dagrl.model_files.library_model import load_hf_config, published_tensors
from dagrl.model_files.tokenizer import load_tokenizer

MIXTURES = {
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 23},
    "mixtral": {"num_local_experts": 4, "intermediate_size": 23},
    "deepseek_v3": {
        "n_routed_experts": 4,
        "moe_intermediate_size": 23,
        "n_group": 1,
        "topk_group": 1,
        "q_lora_rank": None,
        "kv_lora_rank": 9,
        "qk_nope_head_dim": 6,
        "qk_rope_head_dim": 6,
        "v_head_dim": 7,
        "num_key_value_heads": 2,
        "first_k_dense_replace": 0,
    },
}


def mixture(family: str, hidden_size: int = 33) -> ModelSpec:
    common = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "num_experts_per_tok": 2}
    sizes = {"hidden_size": hidden_size, "intermediate_size": 20, "max_position_embeddings": 32}
    heads = {} if family == "deepseek_v3" else {"head_dim": 6}
    init = {"model_type": family, "initializer_range": 0.4, **common, **sizes, **heads, **MIXTURES[family]}
    return ModelSpec(init=init, tokenizer=TokenizerSpec(kind="characters", alphabet="0123456789+="))


@pytest.mark.parametrize("family", MIXTURES)
def test_a_mixture_of_odd_sizes_generates_with_the_log_probs_of_each_expert_alone(family, build_engine, complete):
    model = mixture(family)
    (completion,) = complete(build_engine(model), [[3, 4, 5]], SamplingSpec(max_new_tokens=4, ignore_eos=True))
    reference = AutoModelForCausalLM.from_config(load_hf_config(model), dtype=torch.float32).eval()
    reference.set_experts_implementation("eager")
    source = weight_source(model, 11)
    with torch.no_grad():
        for name, tensor in published_tensors(reference).items():
            tensor.copy_(source.get(name))
        logprobs = reference(torch.tensor([[3, 4, 5, *completion.tokens]])).logits[0].log_softmax(-1)
    expected = logprobs[2:-1].gather(-1, torch.from_numpy(completion.tokens)[:, None])[:, 0]
    np.testing.assert_allclose(completion.logprobs, expected.numpy(), atol=1e-5)


@pytest.mark.parametrize(
    ("hidden_size", "width", "way"), [(32, 24, "grouped_mm"), (32, 23, "eager"), (33, 24, "eager")]
)
def test_only_sizes_that_the_grouped_product_refuses_are_looped_over(hidden_size, width, way):
    model = mixture("mixtral", hidden_size)
    assert model.init is not None
    model.init["intermediate_size"] = width
    built = AutoModelForCausalLM.from_config(load_hf_config(model), dtype=torch.float32)
    avoid_misaligned_grouped_mm(built)
    assert built.config._experts_implementation == way
    built(torch.tensor([[3, 4, 5]]))


def test_a_reward_model_of_odd_sizes_scores(tmp_path):
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    model = mixture("mixtral")
    tokenizer = load_tokenizer(model)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(tmp_path)
    with_template = model.model_copy(update={"tokenizer": tmp_path})
    assert with_template.init is not None
    with_template.init["vocab_size"] = len(tokenizer)
    spec = HfEngineSpec(backend="hf", group="rollout", head="reward")
    classifier = HfClassifier(with_template, spec, RankContext(0, 1, "127.0.0.1", 0, 10.0, 1))
    scores = classifier.scores([[{"role": "user", "content": "1+2="}]], tokens_per_micro_batch=64)
    assert np.isfinite(scores.values).all()
