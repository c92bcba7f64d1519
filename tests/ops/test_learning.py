"""Each estimator and each loss, from rewards to a gradient: a policy of two tokens learns what it is rewarded for.

The policy is a table of logits in place of a model, and plain gradient descent in place of an engine; all else are the
ops and the objective as they are. What a formula has wrong by a sign, or by its mask, shows here.
"""

from __future__ import annotations

from typing import Any, get_args

import numpy as np
import pytest
import torch

from dagrl.algorithms.objective import PolicyObjective
from dagrl.backends.base import ResponseTokens
from dagrl.config.schema import Estimator, LossSpec, PolicyForm
from dagrl.data.batch import Batch, Column
from dagrl.ops.advantage import advantage
from dagrl.ops.base import OpInput
from dagrl.ops.covariance import covariance

GROUPS, EACH, VOCAB, BEST = 8, 8, 5, (1, 3)
STEPS, EPOCHS = 40, 2
ROWS = GROUPS * EACH
BOUNDS = {"gspo": 0.05, "gmpo": 0.4, "cispo": 0.2}
"""Clips that leave this policy room to move; others keep their default."""


OPTIONS: dict[str, dict[str, Any]] = {
    "gdpo": {"rewards": {"first_right": 1.0, "second_right": 1.0}},
    "passk": {"k": 2},
    "rae": {"role": "role"},
}
"""What an estimator cannot do without."""


def sampled(logits: torch.Tensor, random: torch.Generator) -> Batch:
    """Responses of two tokens, drawn from the table; half a point for each token that is right."""
    distribution = logits.detach().log_softmax(-1)
    tokens = torch.multinomial(distribution.exp(), ROWS, replacement=True, generator=random).T
    logprob = distribution.gather(-1, tokens.T).T
    right = (tokens == torch.tensor(BEST)).double()
    offsets = np.arange(0, 2 * ROWS + 1, 2)
    columns = {
        "prompt_tokens": Column(np.zeros(ROWS, dtype=np.int64), np.arange(ROWS + 1)),
        "response_tokens": Column(tokens.reshape(-1).numpy(), offsets),
        "old_logprob": Column(logprob.reshape(-1).numpy(), offsets),
        "response_mask": Column(np.ones(2 * ROWS, dtype=np.float32), offsets),
        "token_turn": Column(np.ones(2 * ROWS, dtype=np.int16), offsets),
        "value": Column(np.full(2 * ROWS, 0.5, dtype=np.float32), offsets),
        "group_id": Column(np.repeat(np.arange(GROUPS), EACH)),
        "reward": Column(right.mean(-1).float().numpy()),
        "first_right": Column(right[:, 0].float().numpy()),
        "second_right": Column(right[:, 1].float().numpy()),
        "both_right": Column(right.prod(-1).float().numpy()),
        "prob_square_sum": Column(distribution.exp().square().sum(-1).repeat(ROWS).numpy(), offsets),
        "role": Column(np.zeros(ROWS, dtype=np.int64)),
        # The likeliest response's.
        "baseline_reward": Column(np.full(ROWS, (logits.argmax(-1) == torch.tensor(BEST)).float().mean().item())),
    }
    return Batch(np.arange(ROWS), columns)


def step(logits: torch.Tensor, batch: Batch, objective: PolicyObjective, rate: float) -> None:
    """One step down the gradient, on all rows."""
    weights, totals = objective.token_weights(batch)
    tokens = torch.from_numpy(batch["response_tokens"].values).reshape(ROWS, 2)
    distribution = logits.log_softmax(-1)
    entropy = -(distribution.exp() * distribution).sum(-1)
    given = ResponseTokens(
        logprob=distribution.gather(-1, tokens.T).T.reshape(-1),
        entropy=entropy.repeat(ROWS),
        weight=torch.from_numpy(weights.values).double() / totals[0],
        columns={name: torch.from_numpy(batch[name].values).double() for name in objective.columns},
        row=torch.arange(ROWS).repeat_interleave(2),
        totals=totals,
    )
    loss, _ = objective(given)
    (gradient,) = torch.autograd.grad(loss, logits)
    with torch.no_grad():
        # Of one length, for losses and estimators have scales of their own.
        logits -= rate * gradient / gradient.norm().clamp(min=1e-9)


def learned(bench, estimator: dict[str, Any], loss: dict[str, Any]) -> float:
    """Mean reward of the policy in the end; it begins with 1/5."""
    nodes = {
        "advantage": {"op": "advantage", **estimator},
        "marks": {"op": "covariance", "share": 0.05},
    }
    score, mark = bench.context("advantage", nodes=nodes), bench.context("marks", nodes=nodes)
    columns = ["old_logprob", *(["clip_cov_mask"] if loss["policy"] in ("clip_cov", "kl_cov", "m2po") else [])]
    objective = PolicyObjective(LossSpec(**loss), 1.0, columns)
    logits = torch.zeros(2, VOCAB, dtype=torch.float64, requires_grad=True)
    random = torch.Generator().manual_seed(3)
    for _ in range(STEPS):
        batch = sampled(logits, random)
        if estimator["estimator"] == "passk":
            # It takes nothing but right and wrong.
            batch = batch.with_columns({"reward": batch["both_right"]})
        (output,) = advantage([OpInput(0, batch)], score)
        batch = batch.with_columns(output.columns)
        (marks,) = covariance([OpInput(0, batch)], mark)
        batch = batch.with_columns(marks.columns)
        for _ in range(EPOCHS):
            step(logits, batch, objective, rate=0.15)
    return float(logits.detach().softmax(-1)[range(2), BEST].mean())


@pytest.mark.parametrize("estimator", [name for name in get_args(Estimator) if name != "none"])
def test_every_estimator_teaches(bench, estimator: str) -> None:
    assert learned(bench, {"estimator": estimator, **OPTIONS.get(estimator, {})}, {"policy": "ppo_clip"}) > 0.8


@pytest.mark.parametrize("policy", [form for form in get_args(PolicyForm) if form != "none"])
def test_every_loss_learns(bench, policy: str) -> None:
    bounds = {"clip_ratio": BOUNDS[policy]} if policy in BOUNDS else {}
    assert learned(bench, {"estimator": "grpo"}, {"policy": policy, **bounds}) > 0.8


def test_mirror_descent_learns_by_its_soft_maximum(bench) -> None:
    estimator = {"estimator": "opmd", "baseline": "logavgexp", "tau": 0.5}
    assert learned(bench, estimator, {"policy": "opmd_kimi", "tau": 0.5}) > 0.8


def test_a_policy_that_is_taught_the_opposite_learns_that(bench) -> None:
    """The test could fail: with advantages turned round, or without any, nothing of the kind is learned."""
    backwards = {"estimator": "grpo", "cosine_reward": {"right": [-1.0, -1.0], "wrong": [1.0, 1.0], "exceeded": 0.0}}
    assert learned(bench, backwards, {"policy": "ppo_clip"}) < 0.2
