"""What an importer writes is valid, or listed as undecided."""

import json
import shutil

import pytest

from dagrl.config.errors import PipelineError
from dagrl.graph.plugins.isolation import without_imports
from dagrl.importing.importer import import_file
from dagrl.importing.settings import Setting, Settings
from dagrl.importing.table import Status, translate
from dagrl.validation import check_file

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
TRAIN = "actor_train.strategy_args"
MEGATRON = f"{ACTOR}.megatron"
VERL = {
    "algorithm.adv_estimator": "grpo",
    "data.train_files": "data/train.parquet",
    "data.val_files": None,
    f"{ACTOR}.strategy": "megatron",
    f"{ROLLOUT}.name": "sglang",
    f"{ROLLOUT}.n": 8,
    "actor_rollout_ref.model.path": "model",
}
SLIME = {
    "--hf-checkpoint": "model",
    "--prompt-data": "data/train.parquet",
    "--rollout-batch-size": 32,
    "--n-samples-per-prompt": 8,
    "--rollout-max-response-len": 512,
    "--num-rollout": 10,
    "--rm-type": "math",
    "--colocate": True,
}
ROLL = {
    "pretrain": "model",
    "actor_train.data_args.file_name": "data/train.parquet",
    "response_length": 512,
    "num_return_sequences_in_group": 8,
    "adv_estimator": "grpo",
    f"{TRAIN}.strategy_name": "megatron_train",
    "actor_infer.strategy_args.strategy_name": "sglang",
    "actor_train.training_args.learning_rate": 1.0e-6,
    "actor_train.device_mapping": "list(range(0,8))",
    "actor_infer.device_mapping": "list(range(0,8))",
    "rewards.math.worker_cls": "MathRuleRewardWorker",
}
TRINITY = {
    "algorithm.algorithm_type": "grpo",
    "model.model_path": "model",
    "model.max_prompt_tokens": 256,
    "model.max_response_tokens": 512,
    "buffer.batch_size": 32,
    "buffer.explorer_input.taskset.path": "data/train.parquet",
    "explorer.rollout_model.engine_type": "sglang",
}
BASES = {"verl": VERL, "slime": SLIME, "roll": ROLL, "trinity": TRINITY}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("validity")
    (path / "model").mkdir()
    config = {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    }
    (path / "model" / "config.json").write_text(json.dumps(config))
    return path


@pytest.fixture
def checked(folder):
    """Translate settings on top of those of a small script; returns translation and problems that are not listed."""
    from dagrl.importing.pipeline_text import pipeline_text
    from dagrl.importing.registry import FRAMEWORKS

    def run(framework: str, given: dict):
        settings = Settings()
        for line, (key, value) in enumerate({**BASES[framework], **given}.items(), start=1):
            settings.add(Setting(key, value, "source", line))
        found = translate(FRAMEWORKS[framework], settings)
        path = folder / "pipeline.yaml"
        path.write_text(pipeline_text(found, path))
        return found, unlisted(path, found)

    return run


def unlisted(path, translation):
    """The problems of a pipeline that the translation does not list for the user to decide."""
    decided = [target for line in translation.lines if line.status is Status.UNKNOWN for target in line.targets]
    try:
        with without_imports():
            check_file(path, with_files=False)
    except PipelineError as error:
        places = [problem.place for problem in error.problems]
        return [each for each in places if not any(_overlap(each, target) for target in decided)]
    return []


def _overlap(one, other):
    """Whether one key is the other, or in it."""
    return f"{one}.".startswith(f"{other}.") or f"{other}.".startswith(f"{one}.")


def status_of(translation, key):
    (line,) = [line for line in translation.lines if line.key == key]
    return line.status


@pytest.mark.parametrize("framework", BASES)
def test_a_small_script_is_valid(checked, framework):
    assert checked(framework, {})[1] == []


@pytest.mark.parametrize("framework", BASES)
def test_what_is_missing_is_listed(checked, framework):
    for key in BASES[framework]:
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


@pytest.mark.parametrize("variant", ["topr", "vanilla", "cispo", "kimi15", "ppo"])
def test_losses_of_roll_have_their_own_options(checked, variant):
    given = {"actor_train.pg_variant": variant, "pg_clip": 0.1, "dual_clip_loss": True}
    found, problems = checked("roll", given)
    assert problems == []
    assert ("nodes.update.loss.clip_ratio" in found.tree) == (variant in ("ppo", "cispo"))


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
def test_the_sources_are_valid(name, sources, folder):
    found = import_file(sources / name, folder=folder)
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
