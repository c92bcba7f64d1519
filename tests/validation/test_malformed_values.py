"""Values that cannot be, in ``model.init``, in config.json of a folder, and across the file: one sentence each."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from project import assert_code

from dagrl.config.errors import PipelineError
from dagrl.validation import check_file

SIZES = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 20,
    "max_position_embeddings": 64,
}
MIXTURE = {"num_experts": 4, "moe_intermediate_size": 8, "num_experts_per_tok": 2}
DEEPSEEK = {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "moe_intermediate_size": 8,
    "num_experts_per_tok": 2,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "first_k_dense_replace": 0,
    "n_group": 1,
    "topk_group": 1,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": SIZES,
    "qwen2": SIZES,
    "qwen3": {**SIZES, "head_dim": 8},
    "qwen3_moe": {**SIZES, **MIXTURE, "head_dim": 8},
    "mixtral": {**SIZES, "num_local_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v3": {**SIZES, **DEEPSEEK},
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 1e4}

# family, changed fields (... takes one away), what is said
CONFIGS: list[tuple[str, dict[str, Any], str]] = [
    ("qwen3", {"rope_theta": "text"}, "`rope_theta`: expected a number above 0, got 'text'"),
    ("qwen3", {"rope_theta": None}, "`rope_theta`: expected a number above 0, got null"),
    ("qwen3", {"rope_theta": float("nan")}, "`rope_theta`: expected a number above 0, got nan"),
    (
        "qwen3",
        {"num_attention_heads": None},
        "`num_attention_heads`: expected a whole number from 1 to 16384, got null",
    ),
    ("qwen3", {"num_attention_heads": 0}, "`num_attention_heads`: expected a whole number from 1 to 16384, got 0"),
    ("qwen3", {"num_key_value_heads": 2.0}, "`num_key_value_heads`: expected a whole number from 1 to 16384, got 2.0"),
    ("qwen3", {"num_key_value_heads": ...}, "num_key_value_heads 32 does not divide num_attention_heads 2"),
    ("qwen3", {"hidden_size": 10**6}, "`hidden_size`: expected a whole number from 1 to 262144, got 1000000"),
    ("qwen3", {"num_hidden_layers": 10**6}, "`num_hidden_layers`: expected a whole number from 1 to 10000"),
    ("qwen3", {"vocab_size": -20}, "`vocab_size`: expected a whole number from 1 to 16777216, got -20"),
    ("qwen3", {"max_position_embeddings": 10**12}, "`max_position_embeddings`: expected a whole number from 1 to 1"),
    ("qwen3", {"head_dim": None}, "`head_dim`: expected a whole number from 1 to 16384, got null"),
    (
        "qwen3",
        {"rms_norm_eps": 1},
        "`rms_norm_eps`: expected a number with a decimal point, which transformers insists",
    ),
    ("qwen3", {"rms_norm_eps": -1e-6}, "`rms_norm_eps`: expected a number above 0, got -1e-06"),
    ("qwen3", {"rms_norm_eps": [1e-6]}, "`rms_norm_eps`: expected a number above 0, got a list"),
    ("qwen3", {"initializer_range": float("inf")}, "`initializer_range`: expected a number from 0 to 1, got inf"),
    ("qwen3", {"hidden_act": None}, "`hidden_act`: expected text, got null"),
    ("qwen3", {"hidden_act": ["silu"]}, "`hidden_act`: expected text, got a list"),
    ("qwen3", {"tie_word_embeddings": "false"}, "`tie_word_embeddings`: expected true or false, got 'false'"),
    ("qwen3", {"attention_bias": 0}, "`attention_bias`: expected true or false, got 0"),
    ("qwen3", {"sliding_window": "4096"}, "`sliding_window`: expected a whole number from 1 to 2147483647, got '4096'"),
    ("qwen3", {"layer_types": ["full_attention"]}, "layer_types names 1 layers and num_hidden_layers is 2"),
    ("qwen3", {"layer_types": "full"}, "`layer_types`: expected a list of names or null, got 'full'"),
    ("qwen3", {"layer_types": ["sliding_attention"] * 2}, "the megatron engine has no layers of sliding_attention"),
    ("qwen3", {"torch_dtype": "bf16"}, "`torch_dtype`: expected a number format (float64, float32, float16, bfloat16)"),
    ("qwen3", {"dtype": 16}, "`dtype`: expected a number format (float64, float32, float16, bfloat16), got 16"),
    ("qwen3", {"eos_token_id": "</s>"}, "`eos_token_id`: expected a whole number or a list of whole numbers or null"),
    ("qwen3", {"pad_token_id": 20}, "pad_token_id 20 is none of the 20 tokens (vocab_size)"),
    ("qwen3", {"architectures": "Qwen3ForCausalLM"}, "`architectures`: expected a list of names or null, got 'Qwen3"),
    ("qwen3", {"id2label": {"one": "a"}}, "`id2label`: expected a mapping from whole numbers to labels"),
    ("qwen3", {"rope_scaling": "linear"}, "`rope_scaling`: expected a mapping, or null, got 'linear'"),
    ("qwen3", {"rope_parameters": [1e4]}, "`rope_parameters`: expected a mapping, or null, got a list"),
    (
        "qwen3",
        {"rope_parameters": {"rope_type": "default", "rope_theta": "1e4"}},
        "above 0 for `rope_theta`, got '1e4'",
    ),
    ("llama", {"rope_scaling": {"rope_type": "llama3"}}, "`rope_scaling`: lacks `factor`, which llama3 needs"),
    ("llama", {"rope_scaling": LLAMA3 | {"factor": -8}}, "expected a number of 1 or more for `factor`, got -8"),
    (
        "llama",
        {"rope_scaling": LLAMA3 | {"low_freq_factor": 2.0}},
        "megatron has llama3 rope scaling with low_freq_fac",
    ),
    (
        "llama",
        {"rope_scaling": {"rope_type": "dynamic", "factor": 2}},
        "has no rope scaling of type 'dynamic'; it knows",
    ),
    ("llama", {"rope_parameters": {"partial_rotary_factor": 0.5, "rope_theta": 1e4}}, "rotates whole heads only"),
    (
        "llama",
        {"num_attention_heads": 3, "num_key_value_heads": 3},
        "3 does not divide hidden_size 16; choose a divisor",
    ),
    ("qwen2", {"hidden_size": 18}, "heads of hidden_size / num_attention_heads = 9 are odd"),
    ("qwen3_moe", {"num_experts": 0}, "`num_experts`: expected a whole number from 1 to 65536, got 0"),
    ("qwen3_moe", {"norm_topk_prob": None}, "`norm_topk_prob`: expected true or false, got null"),
    ("qwen3_moe", {"moe_intermediate_size": "8"}, "`moe_intermediate_size`: expected a whole number from 1 to 2097152"),
    ("qwen3_moe", {"mlp_only_layers": [0, 1]}, "this qwen3_moe has no layer with experts"),
    ("qwen3_moe", {"mlp_only_layers": ["0"]}, "`mlp_only_layers`: expected a list of layers' numbers, got a list"),
    ("qwen3_moe", {"decoder_sparse_step": 0}, "`decoder_sparse_step`: expected a whole number from 1 to 65536, got 0"),
    ("qwen3_moe", {"head_dim": None}, "`head_dim`: expected a whole number from 1 to 16384, got null"),
    ("mixtral", {"num_local_experts": None}, "`num_local_experts`: expected a whole number from 1 to 65536, got null"),
    ("mixtral", {"num_experts_per_tok": 5}, "num_experts_per_tok 5 is more than num_local_experts 4"),
    ("mixtral", {"router_jitter_noise": 0.1}, "the megatron engine has no mixtral with router_jitter_noise 0.1"),
    ("deepseek_v3", {"kv_lora_rank": "8"}, "`kv_lora_rank`: expected a whole number from 1 to 262144, got '8'"),
    ("deepseek_v3", {"q_lora_rank": 0}, "`q_lora_rank`: expected a whole number from 1 to 262144, got 0"),
    ("deepseek_v3", {"v_head_dim": None}, "`v_head_dim`: expected a whole number from 1 to 16384, got null"),
    ("deepseek_v3", {"qk_rope_head_dim": 7}, "qk_rope_head_dim 7 is odd"),
    ("deepseek_v3", {"n_group": 3}, "n_group 3 does not divide n_routed_experts 4"),
    ("deepseek_v3", {"n_group": 4}, "n_group 4 leaves 1 expert a group, which is ranked by its best two"),
    ("deepseek_v3", {"topk_group": 2}, "topk_group 2 is more than n_group 1"),
    ("deepseek_v3", {"routed_scaling_factor": 0.0}, "`routed_scaling_factor`: expected a number above 0, got 0.0"),
    ("deepseek_v3", {"first_k_dense_replace": 2}, "no layer with experts: 2 of 2 layers are dense"),
    ("deepseek_v3", {"norm_topk_prob": False}, "this model has norm_topk_prob false with num_experts_per_tok 2"),
    ("deepseek_v3", {"num_experts_per_tok": 1}, "this model has norm_topk_prob true with num_experts_per_tok 1"),
    ("deepseek_v3", {"rope_scaling": YARN | {"mscale_all_dim": 1.0}}, "reads mscale_all_dim together with mscale only"),
    ("deepseek_v3", {"rope_scaling": YARN | {"factor": "4"}}, "expected a number of 1 or more for `factor`, got '4'"),
    ("deepseek_v3", {"scoring_func": "softmax"}, "has no deepseek_v3 with scoring_func 'softmax'"),
]


def changed(family: str, changes: dict[str, Any]) -> dict[str, Any]:
    config = {"model_type": family, **FAMILIES[family], **changes}
    return {field: value for field, value in config.items() if value is not ...}


@pytest.fixture
def with_folder(project):
    """A pipeline whose model is the folder ``model``, without weights: they are not what is looked at here."""
    init = next(line for line in (project.folder / "p.yaml").read_text().splitlines() if line.startswith("  init:"))
    path = project.pipeline((init, "  path: model #!"))
    (project.folder / "model").mkdir()
    return path


@pytest.mark.parametrize("family", FAMILIES)
def test_the_configs_that_are_broken_below_are_right(project, with_folder, family):
    (project.folder / "model" / "config.json").write_text(json.dumps(changed(family, {})))
    check_file(with_folder, with_files=False)
    assert not problems_of(with_folder)


@pytest.mark.parametrize(
    ("family", "changes", "warned"),
    [
        ("mixtral", {"num_experts_per_tok": 1}, True),
        ("qwen3_moe", {"num_experts_per_tok": 1, "norm_topk_prob": True}, True),
        ("qwen3_moe", {"num_experts_per_tok": 1, "norm_topk_prob": False}, False),
        ("mixtral", {}, False),
    ],
)
def test_a_router_that_cannot_learn_is_warned_of(project, with_folder, family, changes, warned):
    (project.folder / "model" / "config.json").write_text(json.dumps(changed(family, changes)))
    messages = [warning.message for warning in check_file(with_folder, with_files=False).warnings]
    assert any("routers get no gradient" in message for message in messages) == warned


@pytest.mark.parametrize(("family", "changes", "message"), CONFIGS, ids=str)
def test_an_impossible_value_of_config_json_is_one_sentence(project, with_folder, family, changes, message):
    file = project.folder / "model" / "config.json"
    file.write_text(json.dumps(changed(family, changes)))
    (problem,) = problems_of(with_folder)
    assert (problem.place, problem.line) == ("model.path", 3)
    assert message in problem.message
    assert str(file) in problem.message or problem.message.startswith(("the megatron engine", "megatron", "this "))


def test_an_integer_of_config_json_may_be_too_large_for_a_float(project, with_folder):
    (project.folder / "model" / "config.json").write_text(json.dumps(changed("qwen3", {"rope_theta": 10**400})))
    (problem,) = problems_of(with_folder)
    assert "`rope_theta`: expected a number above 0, got 1000" in problem.message


OF_INIT = [case for case in CONFIGS if not case[1].keys() & {"scoring_func", "torch_dtype"}]
"""Without fields that config.json may have and the config class has not."""


@pytest.mark.parametrize(("family", "changes", "message"), OF_INIT, ids=str)
def test_the_same_value_of_init_is_reported_at_its_line(project, family, changes, message):
    init = next(line for line in (project.folder / "p.yaml").read_text().splitlines() if line.startswith("  init:"))
    text = json.dumps(changed(family, changes)).replace("Infinity", ".inf").replace("NaN", ".nan")
    (problem,) = problems_of(project.pipeline((init, f"  init: {text}")))
    field, _, words = message.partition(": ")
    place = f"model.init.{field[1:-1]}" if field.startswith("`") else "model.init"
    assert problem.place.startswith(place)
    assert (words if field.startswith("`") else message) in problem.message
    assert "; " in problem.message


def problems_of(path):
    try:
        check_file(path, with_files=False)
    except PipelineError as error:
        return list(error.problems)
    return []


LARGE = {
    "a quadrillion": (
        {"hidden_size": 262144, "num_hidden_layers": 10000, "intermediate_size": 2097152},
        "{cpus_per_node: 2}",
        "this model has 1.7e+16 parameters, more than any machine can train; lower hidden_size",
    ),
    "one declared GPU": (
        {"hidden_size": 16384, "num_hidden_layers": 126, "intermediate_size": 53248},
        "{gpus_per_node: 1, gpu: H100}",
        "GiB, more than the 1 x 79 GiB of group `train` (H100); add GPUs, or take a smaller model",
    ),
    "any GPU": (
        {"hidden_size": 16384, "num_hidden_layers": 126, "intermediate_size": 53248},
        "{gpus_per_node: 1}",
        "GiB, more than the 1 x 277 GiB of group `train` (GB300); add GPUs",
    ),
}


@pytest.mark.parametrize(("sizes", "group", "message"), LARGE.values(), ids=LARGE.keys())
def test_a_model_too_large_for_memory_is_reported_at_once_with_its_parameters(project, sizes, group, message):
    heads = {"num_attention_heads": 128, "num_key_value_heads": 8, "head_dim": 128}
    init = next(line for line in (project.folder / "p.yaml").read_text().splitlines() if line.startswith("  init:"))
    text = json.dumps({"model_type": "qwen3", **sizes, **heads})
    path = project.pipeline((init, f"  init: {text}"), ("train: {cpus_per_node: 2}", f"train: {group}"))
    start = time.process_time()
    (problem,) = problems_of(path)
    assert time.process_time() - start < 3
    assert problem.place == "model.init"
    assert message in problem.message


BOUNDS = [
    ("n: 4", "n: 10000000", "nodes.rollout.n", "invalid-value"),
    (
        "prompts_per_step: 8",
        "prompts_per_step: 1000000000000",
        "data.prompts_per_step",
        "invalid-value",
    ),
    ("max_prompt_tokens: 16", "max_prompt_tokens: 1000000000", "data.max_prompt_tokens", "invalid-value"),
    ("max_new_tokens: 8", "max_new_tokens: 1000000000", "nodes.rollout.sampling.max_new_tokens", "invalid-value"),
    (
        "max_new_tokens: 8",
        "max_new_tokens: 8, temperature: 1.0e+9",
        "nodes.rollout.sampling.temperature",
        "invalid-value",
    ),
    ("lr: 1e-3", "lr: 1000000.0", "engines.actor.optimizer.lr", "invalid-value"),
    ("lr: 1e-3", f"lr: {10**90}", "engines.actor.optimizer.lr", "invalid-value"),
    ("lr: 1e-3", f"lr: 1e-3, clip_grad: -{10**90}", "engines.actor.optimizer.clip_grad", "invalid-value"),
    ("kl_coef: 0.01", "kl_coef: 1.0e+30", "nodes.update.loss.kl_coef", "invalid-value"),
    ("kl_coef: 0.01", "entropy_coef: 1.0e+30", "nodes.update.loss.entropy_coef", "invalid-value"),
    ("fn: exact", "fn: exact, on_error: 1.0e+300", "nodes.reward.on_error", "invalid-value"),
    ("fn: exact", "fn: exact, concurrency: 1000000", "nodes.reward.concurrency", "invalid-value"),
    ("cpus_per_node: 1", "cpus_per_node: 1000000", "groups.rollout.cpus_per_node", "invalid-value"),
    ("cpus_per_node: 1", "cpus_per_node: 1, nodes: 1000000", "groups.rollout.nodes", "invalid-value"),
    (
        "run: {steps: 10}",
        "run: {steps: 10}\nschedule: {max_staleness: 1000000}",
        "schedule.max_staleness",
        "invalid-value",
    ),
    ("engine: actor, loss", "engine: actor, epochs: 1000000, loss", "nodes.update.epochs", "invalid-value"),
    ("run: {steps: 10}", "run: {steps: 10, save_every: -1}", "run.save_every", "invalid-value"),
    (
        "run: {steps: 10}",
        "run: {steps: 10, start_timeout_s: .inf}",
        "run.start_timeout_s",
        "invalid-value",
    ),
]


@pytest.mark.parametrize(("old", "new", "place", "message"), BOUNDS, ids=lambda value: str(value)[:50])
def test_a_number_with_which_no_run_can_work_is_reported(project, old, new, place, message):
    problem = project.only_problem(project.pipeline((old, new)))
    assert problem.place == place
    assert_code(problem, message)
