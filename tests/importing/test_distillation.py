"""Teachers of verl, slime and ROLL as teachers here."""

from __future__ import annotations

from typing import Any

import pytest

PREFIX = "distillation."
LOSS = f"{PREFIX}distillation_loss."
ONE = {
    f"{PREFIX}enabled": True,
    f"{PREFIX}n_gpus_per_node": 4,
    f"{PREFIX}nnodes": 1,
    f"{PREFIX}teacher_models.teacher_model.model_path": "model",
}
SLIME = {"--use-opd": True, "--opd-kl-coef": 0.5, "--opd-type": "megatron"}
OWN = {
    "--custom-rm-path": "slime.rollout.on_policy_distillation.reward_func",
    "--custom-reward-post-process-path": "slime.rollout.on_policy_distillation.post_process_rewards",
    "--opd-type": "sglang",
    "--rm-url": "http://10.0.0.1:13141/generate",
}
ROLL = {"teacher.model_args.model_name_or_path": "model", "teacher.opd_kl_coef": 0.5}
TRINITY = {
    "algorithm.algorithm_type": "on_policy_distill",
    "explorer.auxiliary_models.0.model_path": "model",
    "explorer.auxiliary_models.0.engine_num": 1,
}
KL_COEF = "algorithm.advantage_fn_args.kl_coef"
DISTILLED = "nodes.advantage.distillation"
TERM = "nodes.update.loss.distillation"


@pytest.mark.parametrize(
    ("framework", "given", "expected"),
    [
        ("verl", ONE, {f"{TERM}.divergence": "k3", f"{TERM}.coef": 1.0, "nodes.advantage.estimator": "grpo"}),
        ("verl", {**ONE, f"{LOSS}distillation_loss_coef": 0.2}, {f"{TERM}.coef": 0.2}),
        ("verl", {**ONE, f"{LOSS}loss_mode": "mse"}, {f"{TERM}.divergence": "k2"}),
        (
            "verl",
            {**ONE, f"{LOSS}loss_mode": "forward_kl_topk", f"{LOSS}log_prob_min_clamp": -10.0},
            {
                f"{TERM}.divergence": "forward_kl",
                f"{TERM}.outside": "ignore",
                f"{TERM}.min_logprob": -10.0,
                "nodes.teacher.top_k": 32,
            },
        ),
        (
            "verl",
            {**ONE, f"{LOSS}use_task_rewards": False, f"{LOSS}distillation_loss_coef": 0.2},
            {f"{TERM}.coef": 1.0, "nodes.update.loss.policy": "none", "nodes.advantage.op": None, "nodes.old.op": None},
        ),
        (
            "verl",
            {**ONE, f"{LOSS}use_policy_gradient": True, f"{LOSS}loss_mode": "k1", f"{LOSS}loss_max_clamp": 10.0},
            {f"{DISTILLED}.coef": 1.0, f"{DISTILLED}.clamp": 10.0, f"{TERM}.coef": None},
        ),
        (
            "verl",
            {**ONE, f"{LOSS}use_policy_gradient": True, f"{LOSS}loss_mode": "k1", f"{LOSS}use_task_rewards": False},
            {"nodes.advantage.estimator": "none", "nodes.update.loss.policy": None},
        ),
        ("slime", SLIME, {f"{DISTILLED}.coef": 0.5, "nodes.advantage.estimator": "grpo", "nodes.reward.op": "reward"}),
        ("slime", {**SLIME, "--opd-teacher-ckpt-step": 100}, {f"{DISTILLED}.coef": 0.5}),
        (
            "slime",
            {**SLIME, **OWN, "--use-rollout-logprobs": True},
            {
                "nodes.advantage.estimator": "none",
                "nodes.reward.op": None,
                "nodes.teacher.endpoint": "http://10.0.0.1:13141/v1",
                "nodes.advantage.read": {"old_logprob": "rollout_logprob"},
            },
        ),
        ("roll", {**ROLL, "use_opd": True}, {f"{DISTILLED}.coef": 0.5, "nodes.advantage.estimator": "grpo"}),
        ("roll", ROLL, {f"{DISTILLED}.coef": 0.5, "nodes.advantage.estimator": "none"}),
        (
            "trinity",
            {**TRINITY, KL_COEF: 0.5},
            {
                f"{DISTILLED}.coef": 0.5,
                "nodes.advantage.estimator": "none",
                "nodes.advantage.read": {"old_logprob": "rollout_logprob"},
                "engines.teacher.model.path": "model",
                "nodes.rollout.n": 8,
                "engines.reference.backend": None,
            },
        ),
        (
            "trinity",
            {**TRINITY, "algorithm.policy_loss_fn": "importance_sampling"},
            {f"{DISTILLED}.coef": 1.0, "nodes.update.loss.policy": "cispo", "nodes.update.loss.clip_ratio_high": 1e8},
        ),
    ],
)
def test_a_teacher_is_an_engine_whose_log_probs_are_learned_from(
    checked, folder, framework: str, given: dict[str, Any], expected: dict[str, Any]
) -> None:
    if framework == "slime" and given["--opd-type"] == "megatron":
        start = folder / "iter_0000100"
        start.mkdir(exist_ok=True)
        for name, text in (
            ("metadata.json", '{"sharded_backend": "torch_dist"}'),
            (".metadata", "-"),
            ("0.distcp", "-"),
        ):
            (start / name).write_text(text)
        by_step = "--opd-teacher-ckpt-step" in given
        given = {**given, "--opd-teacher-load": str(folder if by_step else start)}
        expected = {**expected, "engines.teacher.dist_checkpointing_path": str(start)}
    found, problems = checked(framework, given)
    assert problems == []
    tree = found.tree
    served = "nodes.teacher.endpoint" in tree
    expected = {
        "nodes.teacher.engine": None if served else "teacher",
        "nodes.teacher.write": "teacher_logprob",
    } | expected
    assert not any(line.status == "refused" for line in found.lines)
    assert not any(line.note.startswith("is off") for line in found.lines if line.key in given)
    assert {key: tree.get(key) for key in expected} == expected


@pytest.mark.parametrize(
    ("framework", "given", "refused"),
    [
        ("verl", {**ONE, f"{LOSS}use_policy_gradient": True}, {f"{LOSS}use_policy_gradient"}),
        ("verl", {**ONE, f"{LOSS}loss_mode": "k1"}, {f"{LOSS}loss_mode"}),
        (
            "verl",
            {**ONE, f"{LOSS}use_policy_gradient": True, f"{LOSS}loss_mode": "k1", f"{LOSS}clip_ratio_low": 0.3},
            {f"{LOSS}clip_ratio_low", f"{LOSS}use_policy_gradient"},
        ),
        ("slime", {**SLIME, "--custom-reward-post-process-path": "my.own"}, {"--custom-reward-post-process-path"}),
        ("slime", {"--rm-url": "http://10.0.0.1/score"}, {"--rm-url"}),
        ("trinity", {**TRINITY, "algorithm.algorithm_type": "jsd"}, {"algorithm.algorithm_type", *list(TRINITY)[1:]}),
        (
            "trinity",
            {**TRINITY, "explorer.auxiliary_models.1.model_path": "model"},
            {"explorer.auxiliary_models.1.model_path"},
        ),
        ("roll", {**ROLL, "kl_penalty": "k2"}, {"kl_penalty"}),
        ("roll", {**ROLL, "whiten_advantages": True}, {"whiten_advantages"}),
        (
            "roll",
            {
                "teacher.one.model_args.model_name_or_path": "model",
                "teacher.two.model_args.model_name_or_path": "model",
                "teacher.one.tag_included": ["a"],
                "teacher.two.tag_included": ["a"],
                "teacher.one.opd_kl_coef": 0.5,
                "teacher.two.opd_kl_coef": 1.0,
            },
            {f"teacher.{name}.{key}" for name in ("one", "two") for key in ("tag_included", "opd_kl_coef")},
        ),
    ],
)
def test_what_a_teacher_here_does_not_do_is_refused(translation, framework, given, refused: set[str]) -> None:
    assert {line.key for line in translation(framework, given).lines if line.status == "refused"} == refused


def test_without_distillation_its_keys_change_nothing(translation) -> None:
    for framework, given in (
        ("verl", {**ONE, f"{PREFIX}enabled": False}),
        ("slime", {**SLIME, "--use-opd": False}),
        ("roll", {"use_opd": False, "pure_opd_pipeline_type": "rlvr"}),
    ):
        found = translation(framework, given)
        assert found.tree == translation(framework, {}).tree
        assert {line.status for line in found.lines if line.key in given} == {"implied"}


def test_candidates_of_several_teachers_are_merged(checked) -> None:
    given = {f"{PREFIX}enabled": True, f"{PREFIX}n_gpus_per_node": 8, f"{LOSS}loss_mode": "forward_kl_topk"}
    for name in ("one", "two"):
        prefix = f"{PREFIX}teacher_models.{name}"
        given |= {f"{prefix}.key": name, f"{prefix}.model_path": "model", f"{prefix}.num_replicas": 2}
    found, problems = checked("verl", {**given, f"{LOSS}topk": 64, f"{LOSS}use_task_rewards": False})
    assert problems == []
    assert found.tree["nodes.one_logprob.rows"] == {"data_source": ["one"]}
    assert (found.tree["nodes.one_logprob.top_k"], found.tree["nodes.two_logprob.top_k"]) == (64, 64)
    assert found.tree["nodes.teacher_ids.columns"] == ["one_topk_ids", "two_topk_ids"]
    assert found.tree["nodes.teacher.columns"] == ["one_topk_logprob", "two_topk_logprob"]


ACTOR = "actor_rollout_ref.actor."
GRADIENT = {**ONE, f"{LOSS}use_policy_gradient": True, f"{LOSS}loss_mode": "k1"}
TERMS = {f"{ACTOR}use_kl_loss": True, f"{ACTOR}kl_loss_coef": 0.01, f"{ACTOR}entropy_coeff": 0.02}
CHARGED = {"algorithm.use_kl_in_reward": True, "algorithm.kl_ctrl.kl_coef": 0.01}


@pytest.mark.parametrize("given", [ONE, GRADIENT])
@pytest.mark.parametrize("terms", [TERMS, CHARGED, {**TERMS, **CHARGED}])
def test_without_rewards_verls_loss_has_no_other_terms(checked, given, terms) -> None:
    found, problems = checked("verl", {**given, **terms, f"{LOSS}use_task_rewards": False})
    assert problems == []
    terms_left = ("reference.", ".ref.", "kl_coef", "kl_estimator", "entropy_coef", "kl_in_reward")
    assert [key for key in found.tree if any(term in key for term in terms_left)] == []
    assert {line.status for line in found.lines if line.key in terms} == {"implied"}
    kept, _ = checked("verl", {**given, **terms})
    assert "nodes.ref.op" in kept.tree


@pytest.mark.parametrize("given", [ONE, GRADIENT])
@pytest.mark.parametrize("estimator", ["gae", "remax", "optimal_token_baseline"])
def test_without_rewards_no_node_computes_what_only_an_estimator_reads(checked, given, estimator) -> None:
    options = {f"{LOSS}use_task_rewards": False, "algorithm.adv_estimator": estimator, "critic.optim.lr": 1e-5}
    found, problems = checked("verl", {**given, **options})
    assert problems == []
    assert not any(key.startswith(("nodes.critic", "engines.critic", "nodes.greedy")) for key in found.tree)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({f"{ACTOR}clip_ratio_high": 0.28}, {"clip_ratio": 0.2, "clip_ratio_high": 0.2}),
        ({f"{LOSS}clip_ratio_low": 0.1}, {"clip_ratio": 0.1, "clip_ratio_high": 0.2}),
        ({f"{LOSS}clip_ratio": 0.1}, {"clip_ratio": 0.2, "clip_ratio_high": 0.2}),
        ({f"{LOSS}clip_ratio": 0.1, f"{LOSS}clip_ratio_low": None}, {"clip_ratio": 0.1, "clip_ratio_high": 0.2}),
        ({f"{ACTOR}clip_ratio_c": 5.0}, {"dual_clip": 3.0}),
        ({f"{ACTOR}policy_loss.loss_mode": "gspo"}, {"policy": None, "dual_clip": 3.0, "aggregation": "token-mean"}),
        ({f"{ACTOR}policy_loss.loss_mode": "sapo", f"{ACTOR}tau_pos": 1.0}, {"policy": None, "tau_pos": None}),
        ({f"{ACTOR}policy_loss.loss_mode": "clip_cov"}, {"policy": None}),
        ({"algorithm.rollout_correction.bypass_mode": True}, {"policy": None}),
        (
            {
                "algorithm.rollout_correction.bypass_mode": True,
                "algorithm.rollout_correction.loss_type": "reinforce",
                "algorithm.rollout_correction.rollout_is": "token",
            },
            {"policy": None, "clip_ratio": 0.2},
        ),
    ],
)
def test_a_teachers_advantages_alone_are_in_verls_own_loss(checked, given, expected) -> None:
    found, problems = checked("verl", {**GRADIENT, f"{LOSS}use_task_rewards": False, **given})
    assert problems == []
    assert {key: found.tree.get(f"nodes.update.loss.{key}") for key in expected} == expected
    assert "nodes.held.op" not in found.tree
    assert not any(key.startswith("nodes.update.rollout_correction") for key in found.tree)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({}, None),
        ({f"{LOSS}clip_ratio": 0.3}, None),
        ({"algorithm.adv_estimator": "rloo"}, None),
        ({f"{ACTOR}policy_loss.loss_mode": "gspo"}, "`vanilla`"),
        ({f"{ACTOR}policy_loss.loss_mode": "cispo", f"{ACTOR}clip_ratio_low": 10}, "`vanilla`"),
        ({f"{ACTOR}clip_ratio_high": 0.28}, "clipped at 0.2, 0.2, 3.0"),
        ({f"{ACTOR}clip_ratio_c": 5.0}, "clipped at 0.2, 0.2, 3.0"),
        ({"algorithm.adv_estimator": "gae"}, "whitening"),
        ({"algorithm.adv_estimator": "reinforce_plus_plus"}, "whitening"),
        ({"algorithm.adv_estimator": "reinforce_plus_plus_baseline"}, "whitening"),
    ],
)
def test_another_loss_beside_a_teachers_is_refused(translation, given, why) -> None:
    found = translation("verl", {**GRADIENT, **given})
    notes = [line.note for line in found.lines if line.key == f"{LOSS}use_policy_gradient" and line.status == "refused"]
    assert [why in note for note in notes] == ([True] if why else [])


KL = {"use_kl_loss": True, "kl_loss_coef": 0.01, "add_token_level_kl": True, "init_kl_coef": 0.05}


def test_a_teacher_alone_switches_off_rolls_divergences(checked) -> None:
    for teacher in (ROLL, {**ROLL, "is_pure_opd": True}):
        found, problems = checked("roll", {**teacher, **KL})
        assert problems == []
        assert not any(part in key for key in found.tree for part in ("reference", ".ref.", "kl_coef", "kl_in_reward"))
        assert {line.status for line in found.lines if line.key in KL} == {"implied"}
    kept, _ = checked("roll", {**ROLL, "use_opd": True, **KL})
    assert {"nodes.update.loss.kl_coef", "nodes.advantage.kl_in_reward.coef", "nodes.ref.op"} <= set(kept.tree)


BATCH = "actor_train.training_args."
ONE_STEP = {"init_kl_coef": 0, f"{BATCH}per_device_train_batch_size": 128, "rollout_batch_size": 128}


@pytest.mark.parametrize(
    ("given", "reads_generators"),
    [
        (ONE_STEP, True),
        ({**ONE_STEP, "enable_old_logprobs_recompute": False}, True),
        ({**ONE_STEP, "enable_old_logprobs_recompute": True}, False),
        # Its default, 0.2, is above 0.
        ({key: value for key, value in ONE_STEP.items() if key != "init_kl_coef"}, False),
        ({**ONE_STEP, f"{BATCH}per_device_train_batch_size": 64}, False),
        ({**ONE_STEP, f"{BATCH}per_device_train_batch_size": 64, f"{BATCH}gradient_accumulation_steps": 2}, True),
        # 128 x 8 samples on 4 ranks.
        ({**ONE_STEP, "actor_train.strategy_args.strategy_config.tensor_model_parallel_size": 2}, False),
        ({**ONE_STEP, "actor_train.strategy_args.strategy_name": "deepspeed_train"}, False),
        ({"force_disable_old_logprobs_recompute": True, "enable_old_logprobs_recompute": True}, True),
    ],
)
def test_a_teacher_of_roll_is_compared_with_the_log_probs_that_roll_compares(checked, given, reads_generators) -> None:
    for teacher in (ROLL, {**ROLL, "use_opd": True}):
        found, problems = checked("roll", {**teacher, **given})
        assert problems == []
        expected = {"old_logprob": "rollout_logprob"} if reads_generators else None
        assert found.tree.get("nodes.advantage.read") == expected
        assert found.tree["nodes.old.op"] == "logprob"
