"""What an importer writes is valid, or listed as undecided."""

import shutil
import sys
from pathlib import Path

import pytest

from dagrl.importing import engines
from dagrl.importing.importer import import_file
from dagrl.importing.settings import ImportProblem
from dagrl.importing.table import Status

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
TRAIN = "actor_train.strategy_args"
MEGATRON = f"{ACTOR}.megatron"
FRAMEWORKS = ("verl", "slime", "roll", "trinity")


def status_of(translation, key):
    (line,) = [line for line in translation.lines if line.key == key]
    return line.status


ROLE = "actor_train"
EPSILON = f"{ROLE}.cispo_epsilon_high"


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_small_script_is_valid(checked, framework):
    assert checked(framework, {})[1] == []


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_missing_parts_are_listed(checked, bases, framework):
    for key in bases[framework]:
        assert checked(framework, {key: None})[1] == [], key


@pytest.mark.parametrize("policy", ["gspo", "geo_mean", "sapo", "cispo", "clip_cov", "kl_cov", "gpg", "cpgd"])
def test_losses_of_verl_have_their_own_options(checked, policy):
    found, problems = checked("verl", {f"{ACTOR}.policy_loss.loss_mode": policy, f"{ACTOR}.clip_ratio_high": 0.28})
    assert problems == []
    is_clipped = policy not in ("sapo", "kl_cov", "gpg")
    assert ("nodes.update.loss.clip_ratio_high" in found.tree) == is_clipped
    of_responses = policy in ("gspo", "geo_mean", "sapo")
    expected = "seq-mean-token-mean" if of_responses else "token-mean"
    assert found.tree["nodes.update.loss.aggregation"] == expected


@pytest.mark.parametrize("policy", ["dppo_tv", "dppo_kl"])
def test_dppo_of_verl_bounds_its_weight(checked, policy):
    mode, given = f"{ACTOR}.policy_loss.loss_mode", {f"{ACTOR}.clip_ratio_low": 0.15, f"{ACTOR}.clip_ratio_high": 0.1}
    found, problems = checked("verl", {mode: policy, **given})
    assert problems == []
    options = ("policy", "clip_ratio", "clip_ratio_high", "ratio_cap")
    assert [found.tree[f"nodes.update.loss.{name}"] for name in options] == [policy, 0.15, 0.1, 3.0]
    found, _ = checked("verl", {mode: policy, f"{ACTOR}.clip_ratio_c": 20.0})
    assert found.tree["nodes.update.loss.ratio_cap"] == 20.0


def test_dro_of_verl_has_its_coefficient(checked):
    prefix = f"{ACTOR}.policy_loss"
    found, problems = checked("verl", {f"{prefix}.loss_mode": "dro", f"{prefix}.dro_beta": 0.3})
    assert problems == []
    assert (found.tree["nodes.update.loss.policy"], found.tree["nodes.update.loss.tau"]) == ("dro", 0.3)
    assert "nodes.update.loss.clip_ratio" not in found.tree


@pytest.mark.parametrize(("given", "tau"), [({}, 0.1), ({"actor_train.kimi15_tau": 0.5}, 0.5)])
def test_kimi15_of_roll_squares_tokens(checked, given, tau):
    found, problems = checked("roll", {"actor_train.pg_variant": "kimi15", **given})
    assert problems == []
    assert (found.tree["nodes.update.loss.policy"], found.tree["nodes.update.loss.tau"]) == ("dro", tau)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "low_var_kl"])
def test_the_unbiased_divergence_of_slime_is_a_star(checked, kind):
    given = {"--use-kl-loss": True, "--kl-loss-coef": 0.1, "--kl-loss-type": kind, "--use-unbiased-kl": True}
    found, problems = checked("slime", given)
    assert problems == []
    assert found.tree["nodes.update.loss.kl_estimator"] == ("k3*" if kind == "low_var_kl" else f"{kind}*")
    assert status_of(found, "--use-unbiased-kl") is Status.TRANSLATED
    found, _ = checked("slime", {"--use-unbiased-kl": True})
    assert status_of(found, "--use-unbiased-kl") is Status.IMPLIED


@pytest.mark.parametrize(("given", "delta"), [({}, 1e-4), ({"--opsm-delta": 0.02}, 0.02)])
def test_the_off_policy_mask_of_slime(checked, given, delta):
    found, problems = checked("slime", {"--use-opsm": True, **given})
    assert problems == []
    assert found.tree["nodes.update.loss.off_policy_delta"] == delta
    found, _ = checked("slime", {"--opsm-delta": 0.02})
    assert status_of(found, "--opsm-delta") is Status.IMPLIED


@pytest.mark.parametrize(("given", "bound"), [({}, 0.04), ({"algorithm.policy_loss_fn_args.m2_threshold": 0.02}, 0.02)])
def test_m2po_of_trinity_marks_tokens_by_the_explorers_log_probs(checked, given, bound):
    found, problems = checked("trinity", {"algorithm.policy_loss_fn": "m2po", **given})
    assert problems == []
    assert (found.tree["nodes.held.op"], found.tree["nodes.held.second_moment"]) == ("covariance", bound)
    assert found.tree["nodes.update.read"] == {"old_logprob": "rollout_logprob"}
    assert found.tree["nodes.old.op"] == "logprob"


def test_the_aggregation_of_gspo_differs_between_versions_of_verl(checked):
    # verl 0.9.1 passes loss_agg_mode on; 0.9.0 and the main branch write seq-mean-token-mean in its place.
    mode = f"{ACTOR}.loss_agg_mode"
    for given, status in (({}, Status.UNKNOWN), ({mode: "token-mean"}, Status.UNKNOWN)):
        found, _ = checked("verl", {f"{ACTOR}.policy_loss.loss_mode": "gspo", **given})
        assert status_of(found, mode) is status
    found, _ = checked("verl", {f"{ACTOR}.policy_loss.loss_mode": "gspo", mode: "seq-mean-token-mean"})
    assert status_of(found, mode) is Status.TRANSLATED


def test_cispo_of_verl_is_bounded_from_above(checked):
    bounds = {f"{ACTOR}.clip_ratio_low": 10, f"{ACTOR}.clip_ratio_high": 0.2}
    found, problems = checked("verl", {f"{ACTOR}.policy_loss.loss_mode": "cispo", **bounds})
    assert problems == []
    assert found.tree["nodes.update.loss.clip_ratio_high"] == 0.2
    assert status_of(found, f"{ACTOR}.clip_ratio_low") is Status.IMPLIED


@pytest.mark.parametrize("variant", ["topr", "vanilla", "cispo", "tis", "kimi15", "ppo"])
def test_losses_of_roll_have_their_own_options(checked, variant):
    given = {"actor_train.pg_variant": variant, "pg_clip": 0.1, "dual_clip_loss": True}
    found, problems = checked("roll", given)
    assert problems == []
    assert ("nodes.update.loss.clip_ratio" in found.tree) == (variant == "ppo")


POLICY = "nodes.update.loss.policy"


@pytest.mark.parametrize(
    ("framework", "given", "high", "refused"),
    [
        ("roll", {f"{ROLE}.pg_variant": "cispo"}, 0.1, {f"{ROLE}.pg_variant"}),
        ("roll", {f"{ROLE}.pg_variant": "cispo", f"{ROLE}.cispo_epsilon_low": 1, "pg_clip": 0.3}, 0.1, set()),
        ("roll", {f"{ROLE}.pg_variant": "cispo", f"{ROLE}.cispo_epsilon_low": 1.0, EPSILON: 4.0}, 4.0, set()),
        (
            "roll",
            {
                f"{ROLE}.pg_variant": "cispo",
                f"{ROLE}.cispo_epsilon_low": 0.5,
                f"{ROLE}.cispo_use_unified_mask": True,
            },
            0.1,
            {f"{ROLE}.cispo_epsilon_low", f"{ROLE}.cispo_use_unified_mask"},
        ),
        ("roll", {f"{ROLE}.pg_variant": "tis"}, 1e-9, set()),
        ("roll", {f"{ROLE}.pg_variant": "tis", f"{ROLE}.tis_upper_bound": 5.0}, 4.0, set()),
        (
            "roll",
            {f"{ROLE}.pg_variant": "tis", f"{ROLE}.tis_lower_bound": 0.5},
            1e-9,
            {f"{ROLE}.tis_lower_bound"},
        ),
        ("slime", {"--advantage-estimator": "cispo", "--eps-clip": 1.0, "--eps-clip-high": 4.0}, 4.0, set()),
        ("slime", {"--advantage-estimator": "cispo", "--eps-clip": 1.0}, 1.0, set()),
        ("slime", {"--advantage-estimator": "cispo", "--eps-clip": 0.3}, 0.3, {"--eps-clip"}),
        ("slime", {"--advantage-estimator": "cispo"}, 0.2, {"--advantage-estimator"}),
    ],
)
def test_weights_of_cispo_have_their_own_bounds(checked, framework, given, high, refused):
    found, problems = checked(framework, given)
    assert problems == []
    assert (found.tree[POLICY], found.tree["nodes.update.loss.clip_ratio_high"]) == ("cispo", high)
    assert "nodes.update.loss.clip_ratio" not in found.tree
    assert {line.key for line in found.lines if line.status is Status.REFUSED} == refused


@pytest.mark.parametrize(
    ("framework", "tensor", "key"),
    [
        ("slime", "--tensor-model-parallel-size", "--sequence-parallel"),
        ("verl", f"{MEGATRON}.tensor_model_parallel_size", f"{MEGATRON}.sequence_parallel"),
        (
            "roll",
            f"{TRAIN}.strategy_config.tensor_model_parallel_size",
            f"{TRAIN}.strategy_config.sequence_parallel",
        ),
    ],
)
@pytest.mark.parametrize("size", [None, 1, 2])
def test_sequences_are_split_with_tensor_parallelism_alone(checked, framework, tensor, key, size):
    found, problems = checked(framework, {key: True, **({tensor: size} if size else {})})
    assert problems == []
    assert found.tree.get("engines.actor.parallel.sequence_parallel") == (True if size == 2 else None)


@pytest.mark.parametrize(
    ("field", "value", "written"),
    [
        ("moe_token_dispatcher_type", "flex", None),
        ("moe_token_dispatcher_type", "alltoall", "alltoall"),
        ("recompute_granularity", "some", None),
        ("moe_z_loss_coeff", "many", None),
        ("recompute_modules", "mlp, layernorm", ["mlp", "layernorm"]),
        ("recompute_modules", "nothing", None),
    ],
)
def test_values_that_the_table_of_a_library_lacks_are_refused(checked, field, value, written):
    key = f"{MEGATRON}.override_transformer_config.{field}"
    extra = {"recompute_granularity": "selective"} if field == "recompute_modules" else {}
    given = {f"{MEGATRON}.override_transformer_config.{name}": each for name, each in extra.items()}
    found, problems = checked("verl", {**given, key: value})
    assert problems == []
    assert found.tree.get(f"engines.actor.transformer.{field}") == written
    assert status_of(found, key) is (Status.TRANSLATED if written else Status.REFUSED)


@pytest.mark.parametrize("name", ["verl_grpo_megatron.sh", "verl_grpo_fsdp.sh", "verl_ppo.sh", "verl_multi_turn.sh",
    "siirl_dapo.sh", "slime_grpo.sh", "slime_async.sh", "roll_rlvr.yaml", "roll_async.yaml", "trinity_grpo.yaml",
    "trinity_ppo.yaml"])  # fmt: skip
def test_the_sources_are_valid(name, sources, folder, unlisted):
    found = import_file(sources / name)
    text = found.text.replace(str(found.translation.tree["model.path"]), str(folder / "model"))
    shutil.copy(sources / "my_math.py", folder)
    path = folder / name
    path.with_suffix(".yaml").write_text(text)
    assert unlisted(path.with_suffix(".yaml"), found.translation) == []


def test_micro_batches_hold_the_longest_sample(checked):
    lengths = {"data.max_prompt_length": 2048, "data.max_response_length": 16384}
    for given in ({}, {f"{ACTOR}.use_dynamic_bsz": True, f"{ACTOR}.ppo_max_token_len_per_gpu": 9000}):
        found, problems = checked("verl", {**lengths, **given})
        assert problems == []
        for node in ("old", "update"):
            assert found.tree[f"nodes.{node}.tokens_per_micro_batch"] == 2048 + 16384


def test_a_context_that_is_too_short_is_left_to_the_server(checked):
    for length, kept in ((1023, False), (1024, True)):
        found, problems = checked("verl", {f"{ROLLOUT}.name": "vllm", f"{ROLLOUT}.max_model_len": length})
        assert "engines.generator.server.max_model_len" not in problems
        assert ("engines.generator.server.max_model_len" in found.tree) == kept


SIZES = ("tensor", "pipeline", "context", "expert")
LAYOUT_KEYS = {
    "verl": {name: f"{MEGATRON}.{name}_model_parallel_size" for name in SIZES},
    "slime": {name: f"--{name}-model-parallel-size" for name in SIZES},
    "roll": {name: f"{TRAIN}.strategy_config.{name}_model_parallel_size" for name in SIZES},
    "trinity": {name: f"trainer.megatron.{name}_model_parallel_size" for name in SIZES},
}


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize(
    ("sizes", "listed"),
    [
        ({"tensor": 2, "pipeline": 2, "context": 2}, None),
        ({"tensor": 3}, "tensor_model_parallel_size"),
        ({"tensor": 4, "pipeline": 4}, "tensor_model_parallel_size"),
        ({"pipeline": 5}, "pipeline_model_parallel_size"),
        ({"context": 16}, "context_parallel_size"),
        ({"tensor": 2, "pipeline": 2, "expert": 8}, "expert_model_parallel_size"),
        ({"expert": 3}, "expert_model_parallel_size"),
    ],
)
def test_sizes_that_do_not_divide_the_ranks_are_listed(translation, framework, sizes, listed):
    keys = {key.replace("context_model", "context").replace("context-model", "context"): sizes[name]
            for name, key in LAYOUT_KEYS[framework].items() if name in sizes}  # fmt: skip
    if framework == "trinity":
        keys |= {"trainer.trainer_strategy": "megatron", "mode": "colocate"}
    found = translation(framework, keys)
    unknown = [target for line in found.lines if line.status is Status.UNKNOWN for target in line.targets]
    layout = [target.removeprefix("engines.actor.parallel.") for target in unknown if ".parallel." in target]
    assert [size for size in layout if size != "sequence_parallel"] == ([listed] if listed else [])


@pytest.mark.parametrize(
    ("framework", "given"),
    [
        ("verl", {"algorithm.use_kl_in_reward": True, "algorithm.kl_ctrl.kl_coef": 0.0, "algorithm.kl_penalty": "kl"}),
        ("verl", {"algorithm.use_kl_in_reward": True, "algorithm.kl_ctrl.kl_coef": 0.0,
                  "algorithm.kl_ctrl.type": "adaptive"}),
        ("verl", {f"{ACTOR}.use_kl_loss": True, f"{ACTOR}.kl_loss_coef": 0}),
        ("slime", {"--use-kl-loss": True, "--kl-loss-coef": 0.0, "--kl-coef": 0.0}),
        ("roll", {"add_token_level_kl": True, "init_kl_coef": 0, "kl_penalty": "k1"}),
        ("roll", {"use_kl_loss": True, "kl_loss_coef": 0}),
        ("trinity", {"algorithm.kl_penalty_fn": "k1", "algorithm.kl_penalty_fn_args.kl_coef": 0.0,
                     "algorithm.kl_loss_fn": "none"}),
        ("trinity", {"algorithm.kl_loss_fn": "k2", "algorithm.kl_loss_fn_args.kl_coef": 0.0}),
    ],
)  # fmt: skip
def test_a_divergence_of_weight_0_needs_no_reference(checked, framework, given):
    found, problems = checked(framework, given)
    assert problems == []
    assert not [key for key in found.tree if "kl_in_reward" in key or "reference" in key]


@pytest.mark.parametrize(("chunks", "stages", "kept"), [(2, 4, True), (2, 1, False), (1, 4, False), (2, None, False)])
def test_chunks_of_layers_need_stages(checked, chunks, stages, kept):
    given = {f"{MEGATRON}.virtual_pipeline_model_parallel_size": chunks}
    given |= {f"{MEGATRON}.pipeline_model_parallel_size": stages} if stages else {}
    found, problems = checked("verl", given)
    assert [each for each in problems if "virtual" in each and not kept] == []
    assert ("engines.actor.parallel.virtual_pipeline_model_parallel_size" in found.tree) == kept


@pytest.mark.parametrize(
    ("backend", "given", "listed"),
    [
        ("vllm", {"tensor_model_parallel_size": 4, "data_parallel_size": 4}, True),
        ("vllm", {"tensor_model_parallel_size": 2, "data_parallel_size": 4}, False),
        ("vllm", {"tensor_model_parallel_size": 2, "data_parallel_size": 32}, True),
        ("sglang", {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 3}, True),
        ("sglang", {"tensor_model_parallel_size": 4, "pipeline_model_parallel_size": 2}, False),
        ("sglang", {"tensor_model_parallel_size": 8, "pipeline_model_parallel_size": 2}, False),
        ("sglang", {"tensor_model_parallel_size": 8, "pipeline_model_parallel_size": 4}, True),
        ("sglang", {"tensor_model_parallel_size": 3}, True),
    ],
)
def test_servers_that_do_not_fit_the_machines_are_listed(translation, backend, given, listed):
    keys = {f"{ROLLOUT}.{name}": size for name, size in given.items()}
    found = translation("verl", {f"{ROLLOUT}.name": backend, "trainer.nnodes": 2, **keys})
    largest = max(given, key=given.__getitem__)
    assert (status_of(found, f"{ROLLOUT}.{largest}") is Status.UNKNOWN) == listed


@pytest.mark.parametrize(("size", "listed"), [(8, False), (16, True), (3, True)])
def test_a_server_of_several_machines_is_listed(checked, size, listed):
    key = f"{ROLLOUT}.tensor_model_parallel_size"
    found, _ = checked("verl", {f"{ROLLOUT}.name": "vllm", key: size, "trainer.nnodes": 2})
    assert (status_of(found, key) is Status.UNKNOWN) == listed


def test_words_in_brackets_of_an_array_are_no_indices(tmp_path):
    script = tmp_path / "run.sh"
    script.write_text("N=3\nA=(\n  --moe-layer-freq [0]*$N+[1]*2\n  --seed 4\n)\npython train.py ${A[@]}\n")
    lines = {line.key: line for line in import_file(script).translation.lines}
    assert lines["--moe-layer-freq"].value == "[0]*3+[1]*2"
    assert lines["--seed"].place == f"{script}:4"


@pytest.mark.parametrize(
    ("framework", "given", "kept"),
    [
        ("verl", {"trainer.save_freq": 5}, "all"),
        ("verl", {"trainer.save_freq": 5, "trainer.max_actor_ckpt_to_keep": 2}, 2),
        ("verl", {}, None),
        ("slime", {"--save-interval": 5}, "all"),
        ("slime", {}, None),
        ("roll", {}, "all"),
        ("roll", {"max_ckpt_to_keep": 4}, 4),
        ("trinity", {"trainer.save_interval": 5}, "all"),
        ("trinity", {"trainer.save_interval": 5, "trainer.max_checkpoints_to_keep": 1}, 1),
    ],
)
def test_as_many_checkpoints_are_kept_as_there(checked, framework, given, kept):
    found, problems = checked(framework, given)
    assert problems == []
    assert found.tree.get("run.keep") == kept
    assert kept is None or any("run.keep" in line.targets for line in found.lines)


@pytest.mark.parametrize("made", [True, False])
def test_an_environment_that_is_not_there_is_listed(checked, monkeypatch, made):
    monkeypatch.setattr(engines, "made_environments", lambda: {"vllm": Path(sys.prefix)} if made else {})
    found, _ = checked("verl", {f"{ROLLOUT}.name": "vllm"})
    listed = [line for line in found.lines if line.status is Status.UNKNOWN and "make it" in line.note]
    assert bool(listed) != made


@pytest.mark.parametrize("key", ["tool_config_path", "function_tool_path", "interaction_config_path"])
def test_tools_of_verl_are_no_single_turns(checked, key):
    turns = f"{ROLLOUT}.multi_turn"
    found, _ = checked("verl", {f"{turns}.{key}": "tools.yaml", f"{turns}.max_assistant_turns": 2})
    assert {status_of(found, f"{turns}.{name}") for name in (key, "max_assistant_turns")} == {Status.REFUSED}
    found, _ = checked("verl", {f"{turns}.{key}": None, f"{turns}.max_assistant_turns": 2})
    assert status_of(found, f"{turns}.max_assistant_turns") is Status.IMPLIED


def test_rewards_of_a_batch_are_no_rewards_of_rows(checked):
    for manager, status in (("batch", Status.REFUSED), ("naive", Status.IMPLIED), ("prime", Status.REFUSED)):
        found, _ = checked("verl", {"reward_model.reward_manager": manager})
        assert status_of(found, "reward_model.reward_manager") is status


@pytest.mark.parametrize(
    ("framework", "given", "noted"),
    [
        ("verl", {"data.train_files": "data/dapo-math-17k.parquet"}, True),
        ("verl", {"data.val_files": "data/aime-2024.parquet"}, True),
        ("verl", {}, False),
        ("slime", {"--rm-type": "boxed_dapo"}, True),
        ("slime", {}, False),
        ("trinity", {"buffer.explorer_input.default_reward_fn_type": "math_dapo_reward"}, True),
    ],
)
def test_rewards_of_one_and_minus_one_are_noted(checked, framework, given, noted):
    found, _ = checked(framework, given)
    assert any("1 and -1" in line.note for line in found.lines if "nodes.reward.fn" in line.targets) == noted


@pytest.mark.parametrize(
    ("file", "listed"),
    [("code_contests/train", True), ("apps", True), ("my-taco-set", True), ("encode/train", False), ("gsm8k", False)],
)
def test_data_of_programs_are_not_scored_as_mathematics_without_a_word(checked, file, listed):
    found, _ = checked("verl", {"data.train_files": f"data/{file}.parquet"})
    (line,) = [line for line in found.lines if "nodes.reward.fn" in line.targets]
    assert (line.status is Status.UNKNOWN) == listed


def test_arguments_of_a_loss_of_trinity_without_counterpart_are_refused(checked):
    key = "algorithm.policy_loss_fn"
    found, problems = checked("trinity", {key: "sppo", f"{key}_args.tau": 0.5, f"{key}_args.clip_range": 0.1})
    assert problems == []
    assert {status_of(found, each) for each in (key, f"{key}_args.tau", f"{key}_args.clip_range")} == {Status.REFUSED}
    assert "nodes.update.loss.tau" not in found.tree


def test_one_length_for_both_is_listed(checked):
    given = {"model.max_prompt_tokens": None, "model.max_response_tokens": None, "model.max_model_len": 4096}
    found, problems = checked("trinity", given)
    assert problems == []
    assert status_of(found, "model.max_model_len") is Status.UNKNOWN


def test_a_sequence_of_roll_that_the_prompt_fills_is_listed(checked):
    found, problems = checked("roll", {"response_length": None, "sequence_length": 512, "prompt_length": 512})
    assert problems == []
    assert status_of(found, "sequence_length") is Status.UNKNOWN


def test_an_unset_path_of_trinity_stays_one(tmp_path):
    config = tmp_path / "t.yaml"
    config.write_text(
        "algorithm: {algorithm_type: grpo}\nbuffer: {explorer_input: {taskset: {path: '${oc.env:TASKS}'}}}\n"
        "model: {model_path: '${oc.env:MODEL}/base'}\n"
    )
    tree = import_file(config, framework="trinity").translation.tree
    assert (tree["data.train"], tree["model.path"]) == ("$TASKS", "$MODEL/base")
    tree = import_file(config, (), {"TASKS": "openai/gsm8k"}, "trinity").translation.tree
    assert tree["data.train"] == "data/gsm8k/train.parquet"


def test_pipelines_of_roll_without_rollouts_are_refused(tmp_path):
    (tmp_path / "dpo.yaml").write_text("actor_train: {model_args: {dtype: bf16}}\nsequence_length: 512\n")
    with pytest.raises(ImportProblem, match="no pipeline of ROLL with rollouts"):
        import_file(tmp_path / "dpo.yaml")


BATCH = {"data.train_batch_size": 32, f"{ROLLOUT}.n": 8}
EVAL = {"--eval-interval": 5, "--eval-prompt-data": ["aime", "data/aime.parquet"]}


@pytest.mark.parametrize(
    ("framework", "given", "target", "status"),
    [
        ("verl", {**BATCH, f"{ACTOR}.ppo_mini_batch_size": 64}, "nodes.update.mini_batch", "dropped"),
        ("verl", {**BATCH, f"{ACTOR}.ppo_mini_batch_size": 20}, "nodes.update.mini_batch", "listed"),
        ("verl", {**BATCH, f"{ACTOR}.ppo_mini_batch_size": 16}, "nodes.update.mini_batch", 16),
        ("verl", {f"{ROLLOUT}.top_k": 0}, "nodes.rollout.sampling.top_k", "dropped"),
        ("verl", {f"{ROLLOUT}.temperature": 0}, "nodes.rollout.sampling.temperature", "listed"),
        ("verl", {f"{ROLLOUT}.expert_parallel_size": 8}, "engines.generator.server.ep_size", "listed"),
        ("slime", {"--over-sampling-batch-size": 16}, "nodes.rollout.over_sampling_batch_size", "dropped"),
        ("slime", {"--over-sampling-batch-size": 64}, "nodes.rollout.over_sampling_batch_size", 64),
        ("slime", {"--partial-rollout": True}, "nodes.rollout.partial_rollout", "dropped"),
        (
            "slime",
            {"--partial-rollout": True, "--over-sampling-batch-size": 64, "--mask-offpolicy-in-partial-rollout": True},
            "nodes.rollout.partial_rollout",
            True,
        ),
        ("slime", {"--sglang-dp-size": 2}, "engines.generator.server.dp_size", "dropped"),
        ("slime", {"--sglang-enable-dp-attention": True}, "engines.generator.server.enable_dp_attention", "dropped"),
        ("slime", {"--sglang-ep-size": 8}, "engines.generator.server.ep_size", "listed"),
        ("slime", {"--sglang-pp-size": 2}, "engines.generator.server.tp_size", "listed"),
        ("slime", {**EVAL, "--eval-top-k": 0}, "nodes.rollout.val_sampling.top_k", "dropped"),
        ("roll", {"save_steps": 0}, "run.save_every", "dropped"),
        ("roll", {"eval_steps": 0, "validation.data_args.file_name": "v.json"}, "run.validate_every", "dropped"),
        ("roll", {"max_steps": 0}, "run.steps", "listed"),
        ("roll", {"actor_infer.generating_args.temperature": 0}, "nodes.rollout.sampling.temperature", "listed"),
        ("trinity", {"trainer.critic_warmup": 5}, "nodes.update.critic_warmup", "dropped"),
        ("trinity", {"explorer.over_rollout.ratio": 0.5}, "nodes.update.mini_batch", "dropped"),
        ("trinity", {"algorithm.algorithm_type": "gigpo"}, "nodes.advantage.estimator", "listed"),
    ],
)
def test_values_that_validation_refuses_are_taken_back_or_listed(checked, framework, given, target, status):
    found, problems = checked(framework, given)
    assert problems == []
    listed = any(target in line.targets for line in found.lines if line.status is Status.UNKNOWN)
    assert ("listed" if listed else found.tree.get(target, "dropped")) == status


BYPASS = "algorithm.rollout_correction.bypass_mode"


@pytest.mark.parametrize(
    ("framework", "given"),
    [
        ("verl", {BYPASS: True, "algorithm.use_kl_in_reward": True}),
        ("verl", {"algorithm.adv_estimator": "remax", f"{ACTOR}.policy_loss.loss_mode": "kl_cov"}),
        ("verl", {"algorithm.adv_estimator": "remax", f"{ACTOR}.policy_loss.loss_mode": "clip_cov", BYPASS: True}),
        ("verl", {"algorithm.filter_groups.enable": True, f"{ROLLOUT}.n": 1, "algorithm.adv_estimator": "gae"}),
        ("slime", {"--use-rollout-logprobs": True, "--kl-coef": 0.01}),
        ("slime", {"--use-rollout-logprobs": True, "--use-tis": True}),
        ("trinity", {"algorithm.kl_penalty_fn": "k1", "algorithm.kl_penalty_fn_args.kl_coef": 0.1}),
    ],
)
def test_nodes_that_go_together_are_valid_or_listed(checked, framework, given):
    assert checked(framework, given)[1] == []
