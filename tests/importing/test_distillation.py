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
OWN = {"--custom-rm-path": "slime.rollout.on_policy_distillation.reward_func", "--opd-type": "sglang"}
ROLL = {"teacher.model_args.model_name_or_path": "model", "teacher.opd_kl_coef": 0.5}
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
        ("slime", {**SLIME, **OWN}, {"nodes.advantage.estimator": "none", "nodes.reward.op": None}),
        ("roll", {**ROLL, "use_opd": True}, {f"{DISTILLED}.coef": 0.5, "nodes.advantage.estimator": "grpo"}),
        ("roll", ROLL, {f"{DISTILLED}.coef": 0.5, "nodes.advantage.estimator": "none"}),
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
        given = {**given, "--opd-teacher-load": str(start)}
    found, problems = checked(framework, given)
    assert problems == []
    tree = found.tree
    assert (tree["nodes.teacher.engine"], tree["nodes.teacher.write"]) == ("teacher", "teacher_logprob")
    assert {key: tree.get(key) for key in expected} == expected


@pytest.mark.parametrize(
    ("framework", "given", "refused"),
    [
        ("verl", {**ONE, f"{LOSS}use_policy_gradient": True}, {f"{LOSS}use_policy_gradient"}),
        ("verl", {**ONE, f"{LOSS}loss_mode": "k1"}, {f"{LOSS}loss_mode"}),
        (
            "verl",
            {**ONE, f"{LOSS}use_policy_gradient": True, f"{LOSS}loss_mode": "k1", f"{LOSS}clip_ratio": 0.3},
            {f"{LOSS}clip_ratio"},
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
