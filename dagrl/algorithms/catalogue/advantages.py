"""How rewards become advantages."""

from __future__ import annotations

from dagrl.algorithms import advantages, gae, reward_shaping
from dagrl.algorithms.catalogue.entry import HAND, Chapter, Entry

ESTIMATORS = Chapter(
    "Advantages",
    "estimator",
    "`{op: advantage, estimator: ...}`. r is a response's reward, its penalties taken off; means and deviations are "
    "those of the responses to its prompt. Whitened: moved and scaled to mean 0 and deviation 1 over all tokens of the "
    "step.",
    (
        Entry(
            "grpo",
            "(r - mean) / std",
            advantages.grpo_advantages,
            "DeepSeekMath, arXiv 2402.03300, section 4.1.2",
            "advantages::rewards_are_compared_within_their_group",
            HAND,
            "grpo",
        ),
        Entry(
            "dr_grpo",
            "r - mean",
            advantages.grpo_advantages,
            "arXiv 2503.20783, section 3.2",
            "advantages::without_std_the_deviation_itself_is_the_advantage",
            HAND,
            "drgrpo",
        ),
        Entry(
            "rloo",
            "r - mean of the others",
            advantages.rloo_advantages,
            "arXiv 2402.14740, section 3.3",
            "advantages::rloo_is_the_reward_less_the_mean_of_the_others",
            "a loop over the others",
            "rloo",
        ),
        Entry(
            "opo",
            "r - sum(l r) / sum(l), l the lengths",
            advantages.opo_advantages,
            "arXiv 2505.23585",
            "advantages::opo_has_the_baseline_of_least_variance",
            "the property that defines it, and numbers by hand",
            "opo",
        ),
        Entry(
            "reinforce_plus_plus",
            "whitened(r - charges to come)",
            advantages.reinforce_plus_plus_advantages,
            "REINFORCE++, arXiv 2501.03262",
            "advantages::reinforce_plus_plus_charges_a_token_for_what_comes_after_it",
            HAND,
            "reinforce_pp",
        ),
        Entry(
            "reinforce_plus_plus_baseline",
            "whitened(r - mean)",
            advantages.reinforce_plus_plus_baseline_advantages,
            "REINFORCE++-baseline, arXiv 2501.03262",
            "advantages::the_baseline_form_whitens_deviations_from_the_group",
            HAND,
        ),
        Entry(
            "gae",
            "whitened(sum over k of (gamma lam)^k delta_(t+k)), delta_t = r_t + gamma V_(t+1) - V_t",
            gae.gae_advantages,
            "arXiv 1506.02438, eq. 11, 12 and 16",
            "gae::it_is_the_geometric_mixture_of_n_step_estimates",
            "the mixture of n-step estimates that it is derived from, and numbers by hand",
            "ppo",
        ),
        Entry(
            "remax",
            "r - r of the likeliest response - charges to come",
            advantages.remax_advantages,
            "ReMax, arXiv 2310.10505, algorithm 1",
            "advantages::remax_compares_with_the_likeliest_response",
            HAND,
            "remax",
        ),
        Entry(
            "opmd",
            "r - mean, or r - tau log(mean(exp(r / tau)))",
            advantages.opmd_advantages,
            "Kimi k1.5, arXiv 2501.12599, section 2.3.2; Trinity-RFT (arXiv 2505.17826)",
            "advantages::the_soft_maximum_is_the_groups_worth_at_mirror_descents_optimum",
            "mirror descent's optimum, and numbers by hand",
            "opmd",
        ),
        Entry(
            "gpg",
            "(r - mean) responses / responses of groups with a signal",
            advantages.gpg_advantages,
            "arXiv 2504.02546",
            "advantages::gpg_has_the_gradient_that_a_batch_of_telling_groups_alone_would_have",
            "the mean over telling groups alone, by loops",
        ),
    ),
    notes="""\
Where all rewards of a group are equal, up to rounding, its advantages are 0; `gae` and `reinforce_plus_plus` compare
tokens with all of the step instead, and `remax` each response with a second, greedy rollout:

```yaml
greedy:   {op: rollout, engine: generator, n: 4, sampling: {temperature: 0, max_new_tokens: 2048}}
baseline: {op: reward, fn: math, read_from: [greedy], write: baseline_reward}
```

All other nodes say `read_from: [rollout]`. A greedy rollout samples a prompt once, whatever its `n`, and does not run
in validation.""",
)


LENGTHS = Chapter(
    "Length",
    "key",
    "`{op: advantage, ...}`, before responses are compared; l is a response's length, L `max_new_tokens`.",
    (
        Entry(
            "overlong_buffer",
            "r + penalty_factor clip((L - len - l) / len, -1, 0)",
            reward_shaping.overlong_penalty,
            "DAPO, arXiv 2503.14476, eq. 13",
            "reward_shaping::the_penalty_on_length_falls_in_the_buffer",
            HAND,
            "dapo",
        ),
        Entry(
            "length_reward",
            "r + coef (0.5 - (l - shortest) / (longest - shortest)), of a wrong response at most 0",
            reward_shaping.length_rewards,
            "Kimi k1.5's length penalty (arXiv 2501.12599, section 2.3.3)",
            "reward_shaping::of_a_group_the_shorter_responses_get_more",
            HAND,
        ),
        Entry(
            "cosine_reward",
            "b + (a - b) (1 + cos(pi l / L)) / 2, a and b by correctness",
            reward_shaping.cosine_rewards,
            "arXiv 2502.03373",
            "reward_shaping::the_cosine_reward_goes_from_the_shortest_to_the_longest",
            HAND,
        ),
    ),
)
