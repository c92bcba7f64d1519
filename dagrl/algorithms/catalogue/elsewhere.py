"""What formulas are called in other frameworks, for those who bring a recipe along."""

from __future__ import annotations

ELSEWHERE: tuple[tuple[str, str, str, str], ...] = (
    # Here, verl, ROLL, Trinity-RFT.
    ("estimator: gae", "adv_estimator: gae", "adv_estimator: gae", "ppo"),
    ("estimator: grpo", "adv_estimator: grpo", "adv_estimator: grpo", "grpo"),
    (
        "estimator: dr_grpo",
        "grpo, norm_adv_by_std_in_grpo: False",
        "adv_estimator: reinforce, norm_mean_type: group",
        "",
    ),
    ("estimator: rloo", "adv_estimator: rloo", "", "rloo"),
    ("estimator: remax", "adv_estimator: remax", "", "remax"),
    ("estimator: opo", "adv_estimator: opo", "", ""),
    ("estimator: gpg", "adv_estimator: gpg", "", ""),
    (
        "estimator: reinforce_plus_plus",
        "adv_estimator: reinforce_plus_plus",
        "adv_estimator: reinforce, whiten_advantages",
        "reinforceplusplus",
    ),
    (
        "estimator: reinforce_plus_plus_baseline",
        "adv_estimator: reinforce_plus_plus_baseline",
        "adv_estimator: reinforce, norm_mean_type: group, whiten_advantages",
        "",
    ),
    ("estimator: opmd, baseline", "", "", "opmd, opmd_baseline"),
    ("policy: ppo_clip", "loss_mode: vanilla", "pg_variant: ppo", "ppo"),
    ("policy: gspo", "loss_mode: gspo", "importance_sampling: seq", "gspo"),
    ("policy: gmpo", "loss_mode: geo_mean", "", ""),
    ("policy: sapo", "loss_mode: sapo", "", "sapo"),
    ("policy: cispo", "loss_mode: cispo", "pg_variant: cispo", "cispo"),
    ("policy: clip_cov", "loss_mode: clip_cov", "", ""),
    ("policy: kl_cov", "loss_mode: kl_cov", "", ""),
    ("policy: reinforce", "loss_mode: gpg", "pg_variant: vanilla", ""),
    ("policy: topr", "", "pg_variant: topr", "topr"),
    ("policy: opmd", "", "", "opmd"),
    ("policy: opmd_kimi", "", "pg_variant: kimi15", ""),
    ("dual_clip", "clip_ratio_c", "dual_clip_loss", "clip_ratio_c"),
    ("aggregation", "loss_agg_mode", "loss_agg_mode", "loss_agg_mode"),
    (
        "kl_coef, kl_estimator: k3",
        "use_kl_loss, kl_loss_coef, kl_loss_type: low_var_kl",
        "use_kl_loss, kl_loss_coef",
        "kl_loss_fn: k3, kl_coef",
    ),
    (
        "kl_in_reward: {coef}",
        "use_kl_in_reward, kl_ctrl: {kl_coef}",
        "add_token_level_kl, init_kl_coef",
        "kl_penalty_fn",
    ),
    (
        "kl_in_reward: {target_kl, horizon}",
        "kl_ctrl: {type: adaptive, target_kl, horizon}",
        "target_kl, kl_horizon",
        "adaptive, target_kl, horizon",
    ),
    ("overlong_buffer", "reward_model.overlong_buffer", "", ""),
    ("rollout_correction", "algorithm.rollout_correction", "train_infer_correction", ""),
    ("op: filter", "algorithm.filter_groups", "query_filter_config", "reward_std_filter, dapo_dynamic_sampling"),
    ("op: sft", "", "", "sft"),
    ("op: dpo", "", "", "dpo"),
    ("sft_coef", "", "", "mix"),
)
"""Where a cell is empty there is no such thing there, or not under one name."""


def elsewhere() -> str:
    """The names as Markdown."""
    rows = ["| here | verl | ROLL | Trinity-RFT |", "|---|---|---|---|"]
    rows += ["| " + " | ".join(f"`{cell}`" if cell else "" for cell in row) + " |" for row in ELSEWHERE]
    return "\n".join(["## Names elsewhere\n", *rows, ""])
