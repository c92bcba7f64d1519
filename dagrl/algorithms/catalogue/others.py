"""Critics, responses of others, and what validation counts."""

from __future__ import annotations

from dagrl.algorithms import at_k, dpo, sft, value_loss
from dagrl.algorithms.catalogue.entry import HAND, Chapter, Entry

OTHERS = Chapter(
    "Critics, given responses, validation",
    "name",
    "`op: critic`, `op: sft`, `op: dpo` and `loss: {sft_coef: ...}` in an update; metrics of validation. h is the "
    "difference of the log-ratios of a chosen and a rejected response to the reference. See [critic.md](critic.md), "
    "[offline.md](offline.md) and [validation.md](validation.md).",
    (
        Entry(
            "critic",
            "max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2) / 2",
            value_loss.value_loss,
            "arXiv 1707.06347",
            "value_loss::value_and_gradient_are_those_of_plain_python",
            "the same in plain Python, and numbers by hand",
            "ppo",
        ),
        Entry(
            "sft",
            "-log p",
            sft.SftObjective,
            "",
            "sft::the_likelihood_of_responses",
            HAND,
            "sft",
        ),
        Entry(
            "dpo, loss: sigmoid",
            "-log sigmoid(beta h)",
            dpo.preference_loss,
            "arXiv 2305.18290, eq. 7",
            "dpo::the_loss_of_a_pair",
            HAND,
            "dpo",
        ),
        Entry(
            "dpo, loss: ipo",
            "(h - 1 / (2 beta))^2",
            dpo.preference_loss,
            "arXiv 2310.12036, eq. 17",
            "dpo::the_loss_of_a_pair",
            HAND,
        ),
        Entry(
            "dpo, loss: hinge",
            "max(0, 1 - beta h)",
            dpo.preference_loss,
            "arXiv 2309.06657",
            "dpo::the_loss_of_a_pair",
            HAND,
        ),
        Entry(
            "sft_coef",
            "(1 - sft_coef) policy loss + sft_coef (-log p of experts' responses)",
            sft.MixedObjective,
            "MIX of Trinity-RFT (arXiv 2505.17826)",
            "sft::each_part_is_averaged_over_its_own_rows",
            HAND,
            "mix",
        ),
        Entry(
            "pass@k",
            "1 - C(n - c, k) / C(n, k)",
            at_k.pass_at_k,
            'Chen et al., "Evaluating Large Language Models Trained on Code" (arXiv 2107.03374), equation 1',
            "at_k::pass_at_k_with_many_responses_is_equation_one",
            "the paper's numbers, and all choices counted",
        ),
    ),
)
