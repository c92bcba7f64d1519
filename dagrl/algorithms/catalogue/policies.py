"""What an update minimises."""

from __future__ import annotations

from dagrl.algorithms import (
    aggregation,
    covariance,
    kl,
    kl_control,
    losses,
    objective,
    reward_shaping,
    rollout_correction,
)
from dagrl.algorithms.catalogue.entry import HAND, Chapter, Entry

LOSSES = Chapter(
    "Policy losses",
    "policy",
    "`{op: update, loss: {policy: ...}}`, of each token, to be minimised. A is its advantage, r its probability now "
    "over that before the update, s the geometric mean of a response's r, R their product; sg(x) has no gradient.",
    (
        Entry(
            "ppo_clip",
            "max(-r A, -clip(r, 1 - clip_ratio, 1 + clip_ratio_high) A)",
            losses.ppo_clip,
            "arXiv 1707.06347, eq. 7; Clip-Higher of DAPO: arXiv 2503.14476, section 3.1",
            "losses::each_side_of_the_clip",
            HAND,
            "dapo",
        ),
        Entry(
            "ppo_clip, dual_clip",
            "min(that, -dual_clip A) where A < 0",
            losses.ppo_clip,
            "dual-clip PPO, arXiv 1912.09729",
            "losses::the_dual_clip_bounds_negative_advantages",
            HAND,
        ),
        Entry(
            "clip_cov",
            "ppo_clip, 0 where clip_cov_mask",
            losses.clip_cov,
            "Clip-Cov (arXiv 2505.22617)",
            "losses::clip_cov_takes_marked_tokens_out_of_ppo",
            HAND,
        ),
        Entry(
            "kl_cov",
            "-r A + kl_cov_coef abs(log r) where clip_cov_mask",
            losses.kl_cov,
            "KL-Cov (arXiv 2505.22617)",
            "losses::kl_cov_draws_marked_tokens_back",
            HAND,
        ),
        Entry(
            "gspo",
            "max(-s A, -clip(s, 1 - clip_ratio, 1 + clip_ratio_high) A), s at most e^10",
            losses.gspo,
            "arXiv 2507.18071, in the form of eq. 13 and 14",
            "objective::gspo_is_the_mean_over_responses_of_their_clipped_ratio",
            "eq. 5 on probabilities of whole responses, by autograd",
            "gspo",
        ),
        Entry(
            "gmpo",
            "-A geometric mean of r, each clipped in the direction of A",
            losses.gmpo,
            "arXiv 2507.20673",
            "objective::gmpo_is_the_geometric_mean_of_clipped_ratios",
            "the product of whole responses, by autograd",
        ),
        Entry(
            "sapo",
            "-4 / tau sigmoid(tau (r - 1)) A, tau by the sign of A",
            losses.sapo,
            "arXiv 2511.20347",
            "losses::sapo_closes_a_gate_as_the_ratio_moves",
            HAND,
        ),
        Entry(
            "cispo",
            "-sg(min(r, 1 + clip_ratio_high)) A log p",
            losses.cispo,
            "MiniMax-M1, arXiv 2506.13585, eq. 4 and 5",
            "losses::cispo_bounds_the_weight_and_keeps_the_gradient",
            HAND,
            "cispo",
        ),
        Entry(
            "cpgd",
            "max(-log r A, -clip(log r, log(1 - clip_ratio), log(1 + clip_ratio_high)) A) + drift_coef KL(old, now), "
            "the divergence by k3, its gradient min(r - 1, 2)",
            losses.cpgd,
            "arXiv 2505.12504",
            "losses::cpgd_clips_the_log_of_the_ratio",
            HAND,
            "cpgd",
        ),
        Entry(
            "reinforce",
            "-A log p",
            losses.reinforce,
            "Williams 1992",
            "objective::without_old_logprobs_the_gradient_is_the_policy_gradient",
            "the policy gradient of a softmax, written out",
        ),
        Entry(
            "topr",
            "-A log p, times sg(min(R, 1)) where A < 0",
            losses.topr,
            "arXiv 2503.14286",
            "losses::topr_forgets_bad_responses_that_have_become_unlikely",
            HAND,
        ),
        Entry(
            "opmd",
            "-A log p / (1 + tau)",
            losses.opmd,
            "arXiv 2505.17826",
            "losses::mirror_descent_in_its_simple_form_is_reinforce_held_back",
            HAND,
            "opmd",
        ),
        Entry(
            "opmd_kimi",
            "-A log p, and tau / 2 (log R)^2 of each response",
            losses.opmd_kimi,
            "Kimi k1.5, arXiv 2501.12599, section 2.3.2",
            "objective::kimis_mirror_descent_pulls_as_the_squared_error_of_its_optimum_does",
            "the squared error that the paper derives it from, by autograd",
        ),
        Entry(
            "opmd_pairwise",
            "-sg(a - mean of the group's a) log p, a = A - tau log R",
            losses.opmd_pairwise,
            "Trinity-RFT's pairwise form (arXiv 2505.17826)",
            "objective::pairwise_mirror_descent_pulls_as_the_squares_of_all_differences_do",
            "all pairs of whole responses, by autograd",
        ),
    ),
)

AGGREGATIONS = Chapter(
    "From tokens to a number",
    "aggregation",
    "`loss: {aggregation: ...}`, the same for policies and critics, over the global mini-batch whatever ranks and "
    "micro-batches; by verl's names.",
    (
        Entry(
            "token-mean",
            "sum over tokens / tokens",
            aggregation.token_weights,
            "DAPO, arXiv 2503.14476, section 3.3",
            "objective::aggregations_of_an_on_policy_batch",
            HAND,
            "dapo",
        ),
        Entry(
            "seq-mean-token-sum",
            "sum over tokens / responses",
            aggregation.token_weights,
            "",
            "objective::aggregations_of_an_on_policy_batch",
            HAND,
        ),
        Entry(
            "seq-mean-token-mean",
            "sum over responses of the mean over their tokens / responses",
            aggregation.token_weights,
            "GRPO, arXiv 2402.03300, eq. 3",
            "objective::aggregations_of_an_on_policy_batch",
            HAND,
            "gspo",
        ),
        Entry(
            "seq-mean-token-sum-norm",
            "sum over tokens / (responses max_new_tokens)",
            aggregation.token_weights,
            "Dr. GRPO, arXiv 2503.20783",
            "objective::weights_of_the_aggregations",
            HAND,
            "drgrpo",
        ),
    ),
)

DIVERGENCES = Chapter(
    "Divergence and entropy",
    "key",
    "d = log p - log p under the reference. In the loss: `kl_coef` and `kl_estimator`; in the reward: `kl_in_reward`.",
    (
        Entry("k1", "d", kl.kl_estimate, "Schulman 2020", "kl::estimates_of_one_token", HAND),
        Entry("k2", "d^2 / 2", kl.kl_estimate, "Schulman 2020", "kl::estimates_of_one_token", HAND),
        Entry(
            "k3",
            "min(exp(-d) - 1 + d, 10)",
            kl.kl_estimate,
            "GRPO, arXiv 2402.03300, eq. 4",
            "kl::gradients_are_those_that_the_docstring_states",
            "exact divergences and their gradients",
            "grpo",
        ),
        Entry("abs", "|d|", kl.kl_estimate, "verl", "kl::estimates_of_one_token", HAND),
        Entry(
            "k1+, k3+, abs+",
            "their values, with the gradient of k2",
            kl.kl_estimate,
            "Tang & Munos 2025, arXiv 2506.09477",
            "kl::a_plus_takes_the_gradient_of_the_divergence",
            "exact gradients",
        ),
        Entry(
            "kl_in_reward",
            "r - coef d, token by token or summed up",
            reward_shaping.kl_charges,
            "eq. 2 of Ziegler et al. 2019 (arXiv 1909.08593)",
            "reward_shaping::each_token_is_charged_its_divergence",
            HAND,
            "rloo",
        ),
        Entry(
            "kl_in_reward, target_kl",
            "coef (1 + clip(d / target_kl - 1, -0.2, 0.2) samples / horizon)",
            kl_control.steered,
            "Ziegler et al. 2019 (arXiv 1909.08593, section 2.2)",
            "kl_control::the_weight_grows_where_there_is_too_much_and_shrinks_where_there_is_too_little",
            "numbers by hand, and a policy that it steers to the target",
        ),
        Entry(
            "entropy_coef",
            "- entropy_coef entropy of the token's distribution",
            objective.PolicyObjective,
            "",
            "objective::loss_and_metrics_of_two_tokens",
            HAND,
        ),
        Entry(
            "op: covariance",
            "clip_cov_mask: highest, or drawn by, (log p - mean log p) (A - mean A)",
            covariance.covariances,
            "arXiv 2505.22617",
            "covariance::a_step_along_the_advantages_changes_the_entropy_by_minus_the_covariance",
            "the change of an entropy, by autograd",
        ),
    ),
    notes="""\
Of the estimators only `k3` has a bound, that of verl's `low_var_kl`: without it one token that is far likelier under
the reference outweighs all others. The bound applies where d is below -2.61 or above 11. There a token has no gradient
with `k3`, and that of `k2` with `k3+`. Metrics: `kl/clip_fraction` is the part of such tokens in the update's `kl/ref`,
`kl/in_reward_clip_fraction` in the charge to the reward.

With `target_kl` a step's weight follows from the divergence of the step before it, or of `schedule.max_staleness` steps
further back, the newest that is sure to be over by then; so a run is the same every time, and goes on the same after a
resume. Metrics: `kl/reward_divergence`, a token's, and `kl/reward_weight`.

Clip-Cov and KL-Cov choose among all tokens of the step, by the log-probs from before it, so that their choice does not
depend on ranks and micro-batches:

```yaml
old:  {op: logprob, engine: actor, write: old_logprob}
held: {op: covariance}                      # Clip-Cov: {op: covariance, between: [1.0, 5.0]}
update: {op: update, engine: actor, loss: {policy: kl_cov}}
```""",
)

CORRECTIONS = Chapter(
    "Rollout and trainer",
    "key",
    "`rollout_correction`, for samples whose log-probs differ between the two; q is a token's probability for the "
    "trainer over that for the generator. [mismatch.md](mismatch.md) has all criteria and metrics.",
    (
        Entry(
            "rollout_is: token",
            "loss times sg(min(q, threshold))",
            rollout_correction.importance_weights,
            "Yao et al. 2025",
            "rollout_correction::weights_of_tokens_are_cut_from_above",
            HAND,
        ),
        Entry(
            "rollout_is: sequence",
            "loss times sg(min(product of q over the response, threshold))",
            rollout_correction.importance_weights,
            "Liu et al. 2025",
            "rollout_correction::weights_of_responses_are_products_over_the_tokens_that_count",
            HAND,
        ),
        Entry(
            "rollout_is_threshold_lower",
            "0 outside of both thresholds",
            rollout_correction.importance_weights,
            'Ling Team 2025, "Every Step Evolves", arXiv 2510.18855',
            "rollout_correction::with_a_lower_bound_tokens_outside_weigh_nothing",
            HAND,
        ),
        Entry(
            "rollout_rs",
            "tokens or responses out of the loss by q, or by its divergence",
            rollout_correction.rejected,
            "Li et al. 2025, arXiv 2512.23075",
            "rollout_correction::what_the_criteria_reject",
            HAND,
        ),
    ),
)
