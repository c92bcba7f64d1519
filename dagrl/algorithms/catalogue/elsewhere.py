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

DIFFERENCES: tuple[tuple[str, str, str], ...] = (
    # Here, where, the difference.
    (
        "estimator: grpo",
        "verl",
        "A single response to a prompt has its reward as its advantage; here 0. The same with `rloo`, `opo`, `gpg` and "
        "`reinforce_plus_plus_baseline`.",
    ),
    (
        "estimator: gpg",
        "verl",
        "The factor is responses / responses whose reward is not 0. Here, as in the paper, it is responses / responses "
        "of the groups whose rewards differ. With rewards of 0 and 1, verl's is larger where many answers are wrong, "
        "and takes groups that are all right for a signal.",
    ),
    (
        "estimator: reinforce_plus_plus",
        "verl",
        "Returns are discounted by `gamma`, and tokens before one outside of the mask, a tool's for example, get "
        "nothing of what comes after it. Here returns are not discounted and step over such tokens.",
    ),
    (
        "estimator: reinforce_plus_plus_baseline",
        "slime",
        "The KL term of a token is taken off that token's advantage. Here and in verl the sum over the response is "
        "taken off its reward, before rewards are compared.",
    ),
    (
        "estimator: gae",
        "ROLL, slime",
        "Tokens outside of the mask are steps of their own: ROLL sets their value to 0, slime takes it as it is. Here "
        "and in verl they are stepped over. Without such tokens all are equal.",
    ),
    (
        "policy: gspo",
        "slime, ROLL, Trinity-RFT",
        "s has no bound. Here and in verl s is at most e^10, without gradient beyond.",
    ),
    (
        "policy: sapo",
        "verl",
        "The aggregation is always `seq-mean-token-mean`. Here it is `token-mean` unless `aggregation` says otherwise.",
    ),
    (
        "policy: cispo",
        "verl, slime, ROLL",
        "The weight has a lower bound too: clip(r, 1 - low, 1 + high). Here, as in the paper's runs, it has none, as "
        "with `clip_ratio_low: 1` in verl, `--eps-clip 1` in slime, `cispo_epsilon_low: 1` in ROLL, whose bounds are "
        "0.1 by default. ROLL's `cispo_use_unified_mask` takes gradients away as PPO's clip does.",
    ),
    (
        "policy: cispo",
        "Trinity-RFT",
        "No lower bound by default, but tokens with A > 0 and r > 1 + clip_range_high have no gradient, as with PPO's "
        "clip. Here all tokens have one.",
    ),
    (
        "policy: clip_cov",
        "verl",
        "Tokens are chosen in each micro-batch, by the current log-probs, and not among those that PPO's clip stops. "
        "Here they are chosen once among all tokens of the step, by the log-probs from before it. `kl_cov` alike.",
    ),
    (
        "policy: topr",
        "ROLL, Trinity-RFT",
        "The weight is min(r, 1) of each token. Here, as in the paper, it is min(R, 1) of the response, R the product. "
        "ROLL weighs responses whose score is not above 0, whatever their advantage, and has a factor for either kind.",
    ),
    (
        "policy: opmd_kimi",
        "ROLL",
        "`kimi15` squares the log-ratio of each token: tau / 2 (log r)^2. Here, as in the paper, the log-ratio of the "
        "response is squared. `kimi15_tau` is 0.1 by default, `tau` here 1.",
    ),
    (
        "policy: cpgd",
        "siiRL",
        "The drift has the same gradient; its value there is (r - 1) log p and says nothing by itself.",
    ),
    ("dual_clip", "ROLL", "c is always 1 + 2 pg_clip."),
    (
        "aggregation: seq-mean-token-sum-norm",
        "ROLL, siiRL",
        "The sum is divided by the padded length alone. Here and in verl it is divided by responses times the longest "
        "length.",
    ),
    (
        "kl_estimator: k3",
        "slime, ROLL, Trinity-RFT",
        "slime's and Trinity-RFT's `k3` has no bound; their `low_var_kl`, verl's and ROLL's `k3` are at most 10, as "
        "here.",
    ),
    (
        "kl_in_reward: {coef}",
        "slime",
        "`--kl-coef` has no effect with `grpo`, `gspo` and `cispo`. Here each estimator is charged.",
    ),
    (
        "kl_in_reward: {target_kl, horizon}",
        "verl, ROLL, Trinity-RFT",
        "samples / horizon may exceed 1. Here a step of more samples than the horizon counts as one of the horizon.",
    ),
    (
        "rollout_correction",
        "verl",
        "Bounds of `token_k1`, `seq_sum_k1` and `seq_mean_k1` are of 1 / q, and rejected tokens leave the normalizer: "
        "see [mismatch.md](mismatch.md#what-can-be-corrected).",
    ),
)
"""Where a name stands for another formula there, or for other defaults that change it."""


def elsewhere() -> str:
    """The names as Markdown."""
    rows = ["| here | verl | ROLL | Trinity-RFT |", "|---|---|---|---|"]
    rows += ["| " + " | ".join(f"`{cell}`" if cell else "" for cell in row) + " |" for row in ELSEWHERE]
    differences = ["| here | elsewhere | difference |", "|---|---|---|"]
    differences += [f"| `{here}` | {where} | {difference} |" for here, where, difference in DIFFERENCES]
    note = (
        "\nsiiRL has verl's names. The names of a row stand for the same formula, in value and gradient, but for these "
        "differences:\n"
    )
    return "\n".join(["## Names elsewhere\n", *rows, note, *differences, ""])
