"""The advantage estimators by name, with one signature."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from dagrl.algorithms.advantages import (
    gpg_advantages,
    grpo_advantages,
    opmd_advantages,
    opo_advantages,
    reinforce_plus_plus_advantages,
    reinforce_plus_plus_baseline_advantages,
    remax_advantages,
    rloo_advantages,
    row_sums,
)
from dagrl.algorithms.gae import gae_advantages, token_rewards
from dagrl.algorithms.gigpo import gigpo_advantages
from dagrl.config.schema import AdvantageNode
from dagrl.data.batch import Batch, Column
from dagrl.ops.base import Context
from dagrl.ops.own_estimator import own_advantages


@dataclass(frozen=True, slots=True)
class EstimatorInputs:
    """What estimators compute advantages from: a row for each response that the policy has sampled."""

    node: AdvantageNode
    batch: Batch
    rewards: np.ndarray
    """Rewards with all length terms, float64 [S]."""
    charges: Column | None
    """KL penalties of tokens, ragged as `mask`, if the node charges any."""
    context: Context

    @property
    def mask(self) -> Column:
        return self.batch["response_mask"]

    @property
    def groups(self) -> np.ndarray:
        return self.batch["group_id"].values

    @property
    def charged(self) -> np.ndarray:
        """Rewards minus the penalties of all tokens, for estimators that use one reward per response."""
        return self.rewards if self.charges is None else self.rewards - row_sums(self.charges)

    @property
    def placed_rewards(self) -> Column | None:
        """Rewards of turns on their tokens, if an environment gives them."""
        return self.batch.columns.get("token_reward")


def estimate(inputs: EstimatorInputs) -> dict[str, Column]:
    """``advantage`` by the node's estimator, ragged as the response mask, and its further columns.

    The advantages of estimators in `WHITENED` are not whitened yet.
    """
    estimator = inputs.node.estimator
    if estimator == "gae":
        advantages, returns = _gae(inputs)
        return {"advantage": advantages, "return": returns}
    if ":" in estimator:
        return {"advantage": own_advantages(inputs.node, inputs.batch, inputs.charged, inputs.context)}
    return {"advantage": _ESTIMATORS[estimator](inputs)}


def _gae(inputs: EstimatorInputs) -> tuple[Column, Column]:
    node, mask = inputs.node, inputs.mask
    rewards = token_rewards(inputs.rewards, mask, placed=inputs.placed_rewards, charges=inputs.charges)
    return gae_advantages(rewards, inputs.batch["value"], mask, discount=node.gamma, trace=node.lam)


def _grpo(inputs: EstimatorInputs) -> Column:
    scaled = inputs.node.normalize_by_std
    return grpo_advantages(inputs.charged, inputs.groups, inputs.mask, normalize_by_std=scaled)


def _opmd(inputs: EstimatorInputs) -> Column:
    node = inputs.node
    return opmd_advantages(inputs.charged, inputs.groups, inputs.mask, baseline=node.baseline, tau=node.tau)


def _gigpo(inputs: EstimatorInputs) -> Column:
    node, batch, mask = inputs.node, inputs.batch, inputs.mask
    return gigpo_advantages(
        inputs.charged,
        inputs.groups,
        mask,
        token_rewards=token_rewards(inputs.charged, mask, placed=inputs.placed_rewards),
        prompts=batch["prompt_tokens"],
        tokens=batch["response_tokens"],
        turns=batch["token_turn"],
        discount=node.gamma,
        step_coef=node.step_coef,
        normalize_by_std=node.normalize_by_std,
        mean_over=node.mean_over,
    )


def _remax(inputs: EstimatorInputs) -> Column:
    return remax_advantages(inputs.rewards, inputs.batch["baseline_reward"].values, inputs.mask, inputs.charges)


_ESTIMATORS: dict[str, Callable[[EstimatorInputs], Column]] = {
    "grpo": _grpo,
    "dr_grpo": lambda of: grpo_advantages(of.charged, of.groups, of.mask, normalize_by_std=False),
    "rloo": lambda of: rloo_advantages(of.charged, of.groups, of.mask),
    "opo": lambda of: opo_advantages(of.charged, of.groups, of.mask),
    "opmd": _opmd,
    "gpg": lambda of: gpg_advantages(of.charged, of.groups, of.mask),
    "gigpo": _gigpo,
    "remax": _remax,
    "reinforce_plus_plus": lambda of: reinforce_plus_plus_advantages(of.rewards, of.mask, of.charges),
    "reinforce_plus_plus_baseline": lambda of: reinforce_plus_plus_baseline_advantages(of.charged, of.groups, of.mask),
    "none": lambda of: Column(np.zeros(len(of.mask.values), dtype=np.float32), of.mask.offsets),
}
WHITENED = frozenset({"gae", "reinforce_plus_plus", "reinforce_plus_plus_baseline"})
"""Estimators whose advantages are whitened over all tokens of the step."""
