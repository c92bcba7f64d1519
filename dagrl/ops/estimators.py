"""The advantage estimators by name, with one signature."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from dagrl.algorithms.advantages import (
    gdpo_advantages,
    gpg_advantages,
    grpo_advantages,
    grpo_passk_advantages,
    maxrl_advantages,
    opmd_advantages,
    opo_advantages,
    passk_advantages,
    rae_advantages,
    reinforce_plus_plus_advantages,
    reinforce_plus_plus_baseline_advantages,
    remax_advantages,
    rloo_advantages,
    row_sums,
)
from dagrl.algorithms.gigpo import gigpo_advantages
from dagrl.algorithms.token_returns import (
    gae_advantages,
    length_adaptive_traces,
    optimal_token_baseline_advantages,
    token_rewards,
    turn_returns,
)
from dagrl.config.errors import counted
from dagrl.config.schema import AdvantageNode
from dagrl.data.batch import Batch, Column, view_of
from dagrl.data.stats import Stat
from dagrl.ops.base import Context
from dagrl.ops.work import AdvantageWork
from dagrl.plugins.calls import call_or_stop
from dagrl.plugins.custom import located
from dagrl.plugins.declarations import load_formula


def own_advantages(node: AdvantageNode, batch: Batch, rewards: np.ndarray, context: Context) -> Column:
    """Advantages by the node's function, float32, ragged as the response mask and 0 outside it.

    `rewards` is what the function gets as ``reward``, float64 [S]. Raises ValueError with the function's location if it
    fails or returns something else.
    """
    loaded = context.resources.once(f"estimator {node.estimator}", lambda: load_formula(node, context.resources.folder))
    assert loaded is not None, "the node names a function"
    function, formula = loaded
    seen = view_of(batch)
    columns = {name: seen[name] for name in ("response_mask", *formula.reads)} | {"reward": rewards}
    result = call_or_stop(node.estimator, function, node.args, columns)
    mask = batch["response_mask"]
    where = located(function, node.estimator)
    with np.errstate(over="ignore"):
        values = _per_token(result, mask, where).astype(np.float32)
    kept = mask.values > 0
    if not np.isfinite(values[kept]).all():
        wrong = values[kept][~np.isfinite(values[kept])][0]
        raise ValueError(f"{where} returned an advantage of {wrong}; advantages must be finite numbers")
    return Column(np.where(kept, values, np.float32(0)), mask.offsets)


def _per_token(result: Any, mask: Column, where: str) -> np.ndarray:
    """The result as one number per token, float64."""
    try:
        # One more than there must be: an iterator may have no end.
        rows = [np.asarray(row, dtype=np.float64) for row in islice(result, len(mask) + 1)]
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(
            f"{where} returned {result!r:.100} as advantages; return a number for each response"
        ) from error
    if len(rows) != len(mask):
        count = counted(len(rows), "advantage") if len(rows) < len(mask) else "too many advantages"
        raise ValueError(f"{where} returned {count} for {counted(len(mask), 'response')}")
    for row, length in zip(rows, mask.lengths, strict=True):
        if row.shape not in ((), (length,)):
            raise ValueError(
                f"{where} returned an advantage of shape {list(row.shape)} for a response of {length} tokens; return "
                "one number for each response, or for each an array with one for each of its tokens"
            )
    spread = [np.broadcast_to(row, (length,)) for row, length in zip(rows, mask.lengths, strict=True)]
    return np.concatenate([np.zeros(0), *spread])


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
    stats: dict[str, Stat]
    """Estimators add their metrics here."""

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
    def charged_tokens(self) -> Column:
        """Rewards on the tokens of responses, minus the tokens' own penalties."""
        return token_rewards(self.rewards, self.mask, placed=self.placed_rewards, charges=self.charges)

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
    """Advantages and targets; VAPO (arXiv 2504.05118) computes them with different lambdas."""
    node, mask = inputs.node, inputs.mask
    columns = inputs.charged_tokens, inputs.batch["value"], mask
    alpha = node.length_adaptive_alpha
    trace = node.lam if alpha is None else length_adaptive_traces(mask, alpha)
    advantages, returns = gae_advantages(*columns, discount=node.gamma, trace=trace)
    if alpha is not None or node.lam_value is not None:
        trace = node.lam if node.lam_value is None else node.lam_value
        _, returns = gae_advantages(*columns, discount=node.gamma, trace=trace)
    return advantages, returns


def _grpo(inputs: EstimatorInputs) -> Column:
    scaled = inputs.node.deviation
    return grpo_advantages(inputs.charged, inputs.groups, inputs.mask, normalize_by_std=scaled)


def _maxrl(inputs: EstimatorInputs) -> Column:
    _check_rewards(inputs, inputs.charged >= 0, "0 or more")
    return maxrl_advantages(inputs.charged, inputs.groups, inputs.mask)


def _passk(inputs: EstimatorInputs) -> Column:
    _check_rewards(inputs, np.isin(inputs.charged, (0, 1)), "0 or 1")
    return passk_advantages(inputs.charged, inputs.groups, inputs.mask, k=inputs.node.k)


def _gdpo(inputs: EstimatorInputs) -> Column:
    node = inputs.node
    rewards = {name: inputs.batch[name].values for name in node.rewards}
    return gdpo_advantages(rewards, node.rewards, inputs.groups, inputs.mask, normalize_by_std=bool(node.deviation))


def _grpo_passk(inputs: EstimatorInputs) -> Column:
    scaled = bool(inputs.node.deviation)
    return grpo_passk_advantages(inputs.charged, inputs.groups, inputs.mask, normalize_by_std=scaled)


def _optimal_token_baseline(inputs: EstimatorInputs) -> Column:
    batch = inputs.batch
    return optimal_token_baseline_advantages(
        inputs.charged_tokens,
        inputs.groups,
        inputs.mask,
        logprob=batch["old_logprob"],
        square_sums=batch["prob_square_sum"],
    )


def _agentic_reinforce(inputs: EstimatorInputs) -> Column:
    return turn_returns(inputs.charged_tokens, inputs.mask, discount=inputs.node.gamma)


def _rae(inputs: EstimatorInputs) -> Column:
    node, batch = inputs.node, inputs.batch
    order = np.argsort(batch.rows)
    column = batch[node.role]
    named = column.strings() if column.values.dtype == np.uint8 else [str(value) for value in column.values.tolist()]
    advantages, baselines = rae_advantages(
        inputs.charged[order],
        [named[row] for row in order],
        inputs.mask.take(order),
        baselines=inputs.context.work_as(AdvantageWork).baselines,
        decay=node.decay,
    )
    inputs.stats.update({f"baseline/{role}": Stat.of([value]) for role, value in baselines.items()})
    return advantages.take(np.argsort(order))


def _check_rewards(inputs: EstimatorInputs, valid: np.ndarray, domain: str) -> None:
    """Raise ValueError for the first row whose reward the estimator cannot use."""
    if not valid.all():
        row = int(np.flatnonzero(~valid)[0])
        raise ValueError(
            f"`{inputs.node.estimator}` needs rewards of {domain}, and row {inputs.batch.rows[row]} has "
            f"{inputs.charged[row]:g}; change the reward function, or use `estimator: grpo`"
        )


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
        normalize_by_std=bool(node.deviation),
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
    "maxrl": _maxrl,
    "gdpo": _gdpo,
    "passk": _passk,
    "grpo_passk": _grpo_passk,
    "optimal_token_baseline": _optimal_token_baseline,
    "rae": _rae,
    "agentic_reinforce": _agentic_reinforce,
    "none": lambda of: Column(np.zeros(len(of.mask.values), dtype=np.float32), of.mask.offsets),
}
WHITENED = frozenset({"gae", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "gdpo", "agentic_reinforce"})
"""Estimators whose advantages are whitened over all tokens of the step."""
