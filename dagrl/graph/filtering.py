"""The filter of a pipeline: the size of its rounds, and the columns of a user's rule."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dagrl.config.schema import FilterNode, Pipeline
from dagrl.graph.op_contracts import OpContract, Scope
from dagrl.graph.plugins.custom import load_plain_function, name_of, signature_of
from dagrl.graph.rollouts import leading_rollout, rollouts


def filter_of(pipeline: Pipeline) -> FilterNode | None:
    """The filter; a pipeline has one at most."""
    return next((node for node in pipeline.nodes.values() if isinstance(node, FilterNode)), None)


def prompts_per_round(pipeline: Pipeline) -> int:
    """Prompts whose responses the first round of a step takes; without a filter the only round."""
    node = filter_of(pipeline)
    return (node.prompts_per_round if node else None) or pipeline.data.prompts_per_step


def over_sampled(pipeline: Pipeline) -> int:
    """Prompts that a round starts in excess of those it takes."""
    found = rollouts(pipeline)
    begun = found[leading_rollout(pipeline)].over_sampling_batch_size if found else None
    return begun - prompts_per_round(pipeline) if begun else 0


def prompts_begun(pipeline: Pipeline, taken: int | None = None) -> int:
    """Prompts that a round starts to take `taken`; by default a first round."""
    return (taken or prompts_per_round(pipeline)) + over_sampled(pipeline)


def expected_rounds(pipeline: Pipeline) -> int:
    """Expected rounds of a step, by ``expected_kept_fraction`` of the filter; 1 by default."""
    node = filter_of(pipeline)
    if node is None or node.expected_kept_fraction is None:
        return 1
    kept = node.expected_kept_fraction * prompts_per_round(pipeline)
    # Rounded: 0.15 of 48 is a little less than 7.2 in floats, and no round more is needed for that.
    return min(node.max_rounds, math.ceil(round(pipeline.data.prompts_per_step / kept, 9)))


def filter_contract(node: FilterNode, folder: Path | None) -> OpContract:
    """The contract of a filter. ValueError if the user's rule is invalid."""
    looks_at = (node.metric,) if node.fn is None else rule_columns(load_plain_function(node.fn, folder), node.args)
    # Only a whole round shows whether another one is needed.
    return OpContract(tuple(dict.fromkeys(("group_id", *looks_at))), (), Scope.BATCH)


def rule_columns(rule: Callable[..., Any], args: dict[str, Any]) -> tuple[str, ...]:
    """Columns that a rule takes: its parameters without those in `args`. ValueError if it has others."""
    name, columns = name_of(rule), []
    parameters = signature_of(rule, name).parameters.values()
    for parameter in parameters:
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ValueError(f"the rule {name} takes {parameter}; columns are given by name, so name them one by one")
        if parameter.name not in args and parameter.default is parameter.empty:
            columns.append(parameter.name)
    unknown = [key for key in args if key not in {parameter.name for parameter in parameters}]
    if unknown:
        raise ValueError(f"the rule {name} has no parameter {unknown[0]!r}; remove it from the node's args")
    if not columns:
        raise ValueError(f"the rule {name} takes no column; name one, as in `def keep(reward): ...`")
    return tuple(columns)
