"""The advantage estimators by name. Formulas are in `dagrl.algorithms`; their arguments come from batch and node."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from dagrl.algorithms.advantages import (
    dr_grpo_advantages,
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

    The function gets `rewards`, float64 [S], as ``reward``. Raises ValueError with the function's location if it fails
    or returns something else.
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
    try:
        # At most one item more than required, because an iterator may not end.
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
    """The inputs of estimators: a row for each response that the policy sampled."""

    node: AdvantageNode
    batch: Batch
    rewards: np.ndarray
    """Rewards with all length terms, float64 [S]."""
    charges: Column | None
    """KL penalties of tokens, ragged as the response mask, if the node charges any."""
    context: Context
    stats: dict[str, Stat]
    """Estimators add their metrics here."""

    @property
    def charged(self) -> np.ndarray:
        """Rewards minus the penalties of all tokens, for estimators that use one reward per response."""
        return self.rewards if self.charges is None else self.rewards - row_sums(self.charges)

    def on_tokens(self, rewards: np.ndarray, charges: Column | None = None) -> Column:
        """Rewards on the tokens of responses, including rewards of turns if an environment gives them."""
        placed = self.batch.columns.get("token_reward")
        return token_rewards(rewards, self.batch["response_mask"], placed=placed, charges=charges)

    def arguments(self, formula: Callable[..., Column]) -> dict[str, object]:
        """The arguments of a formula by its parameters' names; the others are options of the node.

        A formula without the parameter `charges` gets rewards with the charges subtracted.
        """
        names, node, batch = inspect.signature(formula).parameters, self.node, self.batch
        known: dict[str, Callable[[], object]] = {
            "rewards": lambda: self.rewards if "charges" in names else self.charged,
            "named_rewards": lambda: {name: batch[name].values for name in node.rewards},
            "weights": lambda: node.rewards,
            "baseline_rewards": lambda: batch["baseline_reward"].values,
            "token_rewards": lambda: self.on_tokens(self.rewards, self.charges),
            "turn_rewards": lambda: self.on_tokens(self.charged),
            "charges": lambda: self.charges,
            "groups": lambda: batch["group_id"].values,
            "normalize_by_std": lambda: node.deviation,
            "discount": lambda: node.gamma,
        }

        def argument(name: str) -> object:
            if name in _COLUMNS:
                return batch[_COLUMNS[name]]
            return known[name]() if name in known else getattr(node, name)

        return {name: argument(name) for name in names}


def estimate(inputs: EstimatorInputs) -> dict[str, Column]:
    """``advantage`` by the node's estimator, ragged as the response mask, and its further columns.

    The advantages of estimators in `WHITENED` are not whitened yet. Raises ValueError for the first row whose reward
    the estimator cannot use.
    """
    estimator = inputs.node.estimator
    if estimator == "gae":
        advantages, returns = _gae(inputs)
        return {"advantage": advantages, "return": returns}
    if estimator == "rae":
        return {"advantage": _rae(inputs)}
    if ":" in estimator:
        return {"advantage": own_advantages(inputs.node, inputs.batch, inputs.charged, inputs.context)}
    if estimator in _DOMAINS:
        domain, is_valid = _DOMAINS[estimator]
        for row in np.flatnonzero(~is_valid(inputs.charged))[:1]:
            raise ValueError(
                f"`{estimator}` needs rewards of {domain}, and row {inputs.batch.rows[row]} has "
                f"{inputs.charged[row]:g}; change the reward function, or use `estimator: grpo`"
            )
    formula = _ESTIMATORS[estimator]
    return {"advantage": formula(**inputs.arguments(formula))}


def _gae(inputs: EstimatorInputs) -> tuple[Column, Column]:
    """Advantages and targets; VAPO (arXiv 2504.05118) computes them with different lambdas."""
    node, mask = inputs.node, inputs.batch["response_mask"]
    columns = inputs.on_tokens(inputs.rewards, inputs.charges), inputs.batch["value"], mask
    alpha = node.length_adaptive_alpha
    trace = node.lam if alpha is None else length_adaptive_traces(mask, alpha)
    advantages, returns = gae_advantages(*columns, discount=node.gamma, trace=trace)
    if alpha is not None or node.lam_value is not None:
        trace = node.lam if node.lam_value is None else node.lam_value
        _, returns = gae_advantages(*columns, discount=node.gamma, trace=trace)
    return advantages, returns


def _rae(inputs: EstimatorInputs) -> Column:
    node, batch = inputs.node, inputs.batch
    order = np.argsort(batch.rows)
    column = batch[node.role]
    named = column.strings() if column.values.dtype == np.uint8 else [str(value) for value in column.values.tolist()]
    advantages, baselines = rae_advantages(
        inputs.charged[order],
        [named[row] for row in order],
        batch["response_mask"].take(order),
        baselines=inputs.context.work_as(AdvantageWork).baselines,
        decay=node.decay,
    )
    inputs.stats.update({f"baseline/{role}": Stat.of([value]) for role, value in baselines.items()})
    return advantages.take(np.argsort(order))


def _no_advantages(mask: Column) -> Column:
    return Column(np.zeros(len(mask.values), dtype=np.float32), mask.offsets)


_COLUMNS = {
    "mask": "response_mask",
    "logprob": "old_logprob",
    "square_sums": "prob_square_sum",
    "prompts": "prompt_tokens",
    "tokens": "response_tokens",
    "turns": "token_turn",
}
"""Parameters of formulas that take columns."""
_ESTIMATORS: dict[str, Callable[..., Column]] = {
    "grpo": grpo_advantages,
    "dr_grpo": dr_grpo_advantages,
    "rloo": rloo_advantages,
    "opo": opo_advantages,
    "opmd": opmd_advantages,
    "gpg": gpg_advantages,
    "gigpo": gigpo_advantages,
    "remax": remax_advantages,
    "reinforce_plus_plus": reinforce_plus_plus_advantages,
    "reinforce_plus_plus_baseline": reinforce_plus_plus_baseline_advantages,
    "maxrl": maxrl_advantages,
    "gdpo": gdpo_advantages,
    "passk": passk_advantages,
    "grpo_passk": grpo_passk_advantages,
    "optimal_token_baseline": optimal_token_baseline_advantages,
    "agentic_reinforce": turn_returns,
    "none": _no_advantages,
}
_DOMAINS: dict[str, tuple[str, Callable[[np.ndarray], np.ndarray]]] = {
    "maxrl": ("0 or more", lambda rewards: rewards >= 0),
    "passk": ("0 or 1", lambda rewards: np.isin(rewards, (0, 1))),
}
WHITENED = frozenset({"gae", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "gdpo", "agentic_reinforce"})
"""Estimators whose advantages are whitened over all tokens of the step."""
