"""Trinity-RFT's algorithm and rewards, and the keys without a counterpart."""

from __future__ import annotations

from dagrl.importing import engines, parts
from dagrl.importing.table import Translation, implied, joint, refused, refused_unless, under
from dagrl.importing.teachers import ADVANTAGE, SERVED, put_teachers
from dagrl.importing.trinity.common import MODEL, TASKS, TYPES, type_default, uses_critic

_ESTIMATORS = {
    **{name: name for name in ("grpo", "rloo", "remax", "opmd", "gigpo")},
    "grpo_verl": "grpo",
    "opmd_verl": "opmd",
    "on_policy_distill": "none",
    "ppo": "gae",
    "reinforceplusplus": "reinforce_plus_plus",
}
_LOSSES = {
    "ppo": "ppo_clip",
    **{name: name for name in ("gspo", "cispo", "sapo", "topr", "opmd", "m2po")},
    "importance_sampling": "cispo",
}
_CLIPS = {"ppo": (0.2, 0.2), "gspo": (0.0003, 0.0004), "cispo": (None, 0.28)}
"""Trinity's default bounds of the ratio."""
_ARGUMENTS = {
    "gamma": "gamma",
    "lam": "lam",
    "opmd_baseline": "baseline",
    "tau": "tau",
    "omega": "step_coef",
    "std_cal_level": "normalize_by_std",
}
"""``advantage_fn_args`` -> options of the node."""
_JSD = (
    "the advantage there is minus a part of the divergence, and does not follow its gradient; the divergence itself is "
    "`nodes.update.loss.distillation` with `divergence: jsd` (docs/distillation.md); grpo is used instead"
)
_LOSS = "nodes.update.loss"


@joint("algorithm.algorithm_type algorithm.advantage_fn algorithm.advantage_fn_args.*", always=True)
def _algorithm(t: Translation) -> None:
    key, advantage, arguments = "algorithm.algorithm_type", "algorithm.advantage_fn", "algorithm.advantage_fn_args"
    t.put("nodes.advantage.op", "advantage")
    parts.put_node(t, "update", "update", "actor")
    name = t.get(advantage) or type_default(t, 0)
    if t.get(key) not in TYPES:
        t.put("nodes.advantage.estimator", "grpo")
        reason = "has no counterpart, or needs a separate pipeline (docs/offline.md); grpo is used instead"
        t.refuse(_JSD if t.get(key) == "jsd" else reason, key)
        return
    if name in _ESTIMATORS:
        keys = (key, advantage) if t.given(advantage) else (key,)
        t.write("nodes.advantage.estimator", _ESTIMATORS[name], *keys)
    else:
        t.put("nodes.advantage.estimator", "grpo")
        reason = "has no counterpart; write your own estimator (docs/your_own.md); grpo is used instead"
        t.refuse(_JSD if name == "jsd" else reason, advantage, key)
    for option, target in _ARGUMENTS.items():
        t.copy(f"{arguments}.{option}", f"nodes.advantage.{target}")
    if t.number(f"{arguments}.std_threshold"):
        t.put("nodes.keep.op", "filter")
        t.copy(f"{arguments}.std_threshold", "nodes.keep.min_std")


@joint("model.critic_model_path", always=True)
def _critic(t: Translation) -> None:
    if uses_critic(t):
        engines.put_critic(t)
        t.put("nodes.critic.mini_batch", t.tree["nodes.update.mini_batch"])
        engines.critic_model(t, "model.critic_model_path", "model.model_path")


_PREFIX = "algorithm.policy_loss_fn_args"


@joint(
    "algorithm.policy_loss_fn algorithm.loss_agg_mode algorithm.entropy_loss_fn algorithm.entropy_loss_fn_args.*",
    under(_PREFIX, "* clip_range clip_range_low clip_range_high clip_ratio_c"),
    always=True,
)
def _loss(t: Translation) -> None:
    key, mode = "algorithm.policy_loss_fn", "algorithm.loss_agg_mode"
    name = t.get(key) or type_default(t, 1)
    if name not in _LOSSES:
        reason = "has no counterpart; write your own loss (docs/your_own.md); ppo is used instead"
        t.refuse(reason, key, *t.below(_PREFIX))
        t.write(f"{_LOSS}.aggregation", t.get(mode) or "token-mean", mode)
        return
    if name != "ppo" or t.given(key):
        t.write(f"{_LOSS}.policy", _LOSSES[name], key if t.given(key) else "algorithm.algorithm_type")
    if name in _CLIPS:
        _clip(t, name)
    if name == "importance_sampling":  # -r A there, whose gradient is that of CISPO without a bound.
        t.put(f"{_LOSS}.clip_ratio_high", 1.0e8)
    if name == "m2po":
        t.put("nodes.held.op", "covariance")
        t.copy(f"{_PREFIX}.m2_threshold", "nodes.held.second_moment", 0.04)
    for option in ("tau", "tau_pos", "tau_neg"):
        t.copy(f"{_PREFIX}.{option}", f"{_LOSS}.{option}")
    mode = f"{_PREFIX}.loss_agg_mode" if t.given(f"{_PREFIX}.loss_agg_mode") else mode
    if name != "gspo" or t.given(mode):
        t.write(f"{_LOSS}.aggregation", t.get(mode) or "token-mean", mode)
    t.copy("algorithm.entropy_loss_fn_args.entropy_coef", f"{_LOSS}.entropy_coef", 0.0)


def _clip(t: Translation, name: str) -> None:
    low, high = _CLIPS[name]
    for end, target, default in (("low", "clip_ratio", low), ("high", "clip_ratio_high", high)):
        key = t.first(f"{_PREFIX}.clip_range_{end}", f"{_PREFIX}.clip_range") or f"{_PREFIX}.clip_range_{end}"
        if name != "cispo" or end == "high":
            t.copy(key, f"{_LOSS}.{target}", default)
    if name == "ppo":
        t.copy(f"{_PREFIX}.clip_ratio_c", f"{_LOSS}.dual_clip", 3.0)


@joint(
    "algorithm.kl_loss_fn algorithm.kl_loss_fn_args.kl_coef algorithm.kl_penalty_fn "
    "algorithm.kl_penalty_fn_args.* algorithm.bypass_old_logprobs",
    always=True,
)
def _divergence(t: Translation) -> None:
    key, penalty, bypass = "algorithm.kl_loss_fn", "algorithm.kl_penalty_fn", "algorithm.bypass_old_logprobs"
    name, target = t.get(key) or type_default(t, 2), "nodes.advantage.kl_in_reward"
    if name not in (None, "none"):
        if estimator := parts.kl_estimator(name):
            t.write(f"{_LOSS}.kl_estimator", estimator, key)
            t.copy("algorithm.kl_loss_fn_args.kl_coef", f"{_LOSS}.kl_coef", 0.001)
        else:
            t.refuse("estimators are k1, k2, k3 and abs", key)
    if t.get(penalty) not in (None, "none"):
        t.copy(f"{penalty}_args.kl_coef", f"{target}.coef", 0.001)
        t.write(f"{target}.estimator", parts.kl_estimator(t.get(penalty)) or "k1", penalty)
        for name in ("target_kl", "horizon") if t.flag(f"{penalty}_args.adaptive") else ():
            value, keys = t.get(f"{penalty}_args.{name}"), (f"{penalty}_args.{name}", f"{penalty}_args.adaptive")
            t.write(f"{target}.{name}", value, *keys)
    reads_explorers = t.get(bypass) is not False and f"{target}.coef" not in t.tree
    if reads_explorers:
        note = "ratios to the explorer's log-probs"
        t.write("nodes.update.read", {"old_logprob": "rollout_logprob"}, bypass, note=note)
    if not reads_explorers or t.tree.get(f"{_LOSS}.policy") == "m2po":
        parts.put_logprob(t, "old", "actor", "old_logprob")
    parts.put_reference(t)


@joint("explorer.auxiliary_models*", always=True)
def _teacher(t: Translation) -> None:
    """The first auxiliary model is the teacher of ``on_policy_distill``; others judge, in workflows of the user's."""
    path = "explorer.auxiliary_models.0.model_path"
    if not _is_distilled(t):
        t.refuse("an engine that follows none judges: {op: judge} (docs/rewards.md)", *t.current)
        return
    t.copy("algorithm.advantage_fn_args.kl_coef", f"{ADVANTAGE}.coef", 1.0)
    put_teachers(t, {"teacher": None}, "data_source")
    t.put("engines.teacher.group", t.tree["engines.actor.group"])
    if t.get(path) is None:
        t.note(path, "engines.teacher.model.path", "name the folder of the teacher's model")
        t.put("engines.teacher.model.path", "TEACHER")
    else:
        t.copy(path, "engines.teacher.model.path")
    for key in t.rest():
        if key.startswith("explorer.auxiliary_models.0."):
            t.imply(f"{SERVED}, on the trainer's GPUs", key)
    t.refuse("a row has one teacher: the first model", *t.rest())


def _is_distilled(t: Translation) -> bool:
    return (t.get("algorithm.advantage_fn") or type_default(t, 0)) == "on_policy_distill"


ALGORITHM = (_algorithm, _critic, _loss, _divergence, _teacher)


@joint(
    under(TASKS, "default_workflow_type default_reward_fn_type"),
    under(f"{TASKS}.taskset", "default_workflow_type default_reward_fn_type"),
    always=True,
)
def _reward(t: Translation) -> None:
    """A task set's own types take precedence."""
    t.put("nodes.reward.op", "reward")
    t.put("nodes.reward.fn", "math")
    flow, key = (
        f"{TASKS}.taskset.{name}" if t.given(f"{TASKS}.taskset.{name}") else f"{TASKS}.{name}"
        for name in ("default_workflow_type", "default_reward_fn_type")
    )
    value = str(t.get(key) or "")
    known = ("", "None", "math_reward", "math_boxed_reward", "math_dapo_reward", "accuracy_reward")
    if value in known and "math" in value + str(t.get(flow)):
        note = "without points for the format" + (parts.DAPO if "dapo" in value else "")
        t.write("nodes.reward.fn", "math", *(option for option in (key, flow) if t.given(option)), note=note)
    else:
        t.note(key if t.given(key) else flow, "nodes.reward.fn", "set `fn`: math, or your own; math is used instead")
    for option in (f"{TASKS}.default_workflow_type", f"{TASKS}.taskset.default_workflow_type"):
        if "on_policy_distill" in str(t.get(option)):
            t.imply("the teacher reads each sample in `nodes.teacher`; a reward measures the student alone", option)
        elif t.given(option) and "math" not in str(t.get(option)):
            t.refuse("your own Workflow is `nodes.rollout.agent` (docs/gateway.md)", option)


_PENALTY = f"{TASKS}.taskset.reward_fn_args"


@joint(f"{_PENALTY}.*")
def _penalty(t: Translation) -> None:
    switch, target = f"{_PENALTY}.enable_overlong_penalty", "nodes.advantage.overlong_buffer"
    if t.flag(switch):
        t.write(f"{target}.len", t.get(f"{_PENALTY}.cache_length"), f"{_PENALTY}.cache_length", switch)
        t.copy(f"{_PENALTY}.penalty_factor", f"{target}.penalty_factor", 1.0)
        t.imply("the penalty ends at `max_new_tokens`", f"{_PENALTY}.max_response_length")
    t.refuse("arguments of the function are `nodes.reward.args`", *t.rest())


@joint("data_processor.experience_pipeline.operators.*")
def _operators(t: Translation) -> None:
    for key in t.current:
        threshold = key.removesuffix(".name") + ".args.threshold"
        if not key.endswith(".name"):
            continue
        if t.get(key) in ("dapo_dynamic_sampling", "reward_std_filter", "reward_filter"):
            t.write("nodes.keep.op", "filter", key)
            t.copy(threshold, "nodes.keep.min_std", above=0)
        elif t.get(key) == "mask_response_truncated":
            t.refuse("exclude them with your own mask (docs/migration.md)", key)
        else:
            t.refuse("has no counterpart; write your own node (docs/your_own.md)", key)
    t.refuse("samples are trained on in their own step", *t.rest())


REWARD = (_reward, _penalty, _operators)


_BUFFER = "buffer.trainer_input"
REST = (
    implied(
        "samples are in Ray's object store, and on disk with a buffer",
        under(f"{_BUFFER}.experience_buffer", "name storage_type path capacity max_read_timeout"),
    ),
    refused_unless(
        (1.0, 0), "log-probs would belong to another policy", "model.repetition_penalty model.min_response_tokens"
    ),
    refused("prepare the file beforehand", "data_processor.* service*"),
    refused(
        "files of experience are read by `dagrl run --only` (docs/explore_train.md)", f"{_BUFFER}.experience_buffer.*"
    ),
    refused(
        "experts' responses are `{op: mix}` with `data.responses` (docs/offline.md)",
        f"{_BUFFER}.auxiliary_buffers* algorithm.sample_strategy*",
    ),
    refused("a run for each stage, from what `dagrl export` makes of the one before", "stages*"),
    refused("is a tool or an environment (docs/multi_turn.md)", under(TASKS, "taskset.workflow_args* *workflow_args*")),
    implied(
        "columns are the converted file's",
        under(f"{TASKS}.eval_tasksets", "*.format.* *.storage_type *.subset_name"),
    ),
    refused("all validation sets share reward and format", under(TASKS, "eval_tasksets.* default_eval_workflow_type")),
    refused("several task sets are one file", under(TASKS, "tasksets.*")),
    refused("trackers read their own environment", "monitor.monitor_args*"),
    implied(
        "`nodes.rollout.tool_timeout_s` bounds a call, `on_environment_error` says what follows",
        "explorer.max_timeout explorer.max_retry_times",
    ),
    implied(
        "is `dagrl run --run-dir DIR`; a run goes on in its folder by itself",
        "checkpoint_root_dir continue_from_checkpoint trainer.save_hf_checkpoint",
    ),
    implied("`sleep: auto` offloads where engines share GPUs", "trainer.*offload*"),
    implied(
        "follows from the pipeline",
        under(TASKS, "taskset.*"),
        under(MODEL, "*"),
        "model.* explorer.* synchronizer.* monitor.* trainer.* buffer.* cluster.* log* ray_namespace "
        "ignore_validator_suggestions algorithm.optimizer.* algorithm.enable_router_replay",
    ),
)
