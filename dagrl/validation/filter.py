"""``op: filter``: what it may look at, and rounds in which a step can be full."""

from __future__ import annotations

from dagrl.config.errors import Place, listed
from dagrl.config.loading.positions import Findings
from dagrl.config.schema import FilterNode, Pipeline
from dagrl.graph.columns import CORE_COLUMNS, Shape
from dagrl.graph.dag import Graph
from dagrl.graph.rollouts import leading_rollout, rollouts

_BOUNDS = ("metric", "lower", "upper", "min_std")


def check_filter(pipeline: Pipeline, graph: Graph | None, findings: Findings) -> None:
    """Report filters that let nothing pass, or everything; `graph` is None where columns are not sorted out yet."""
    filters = {name: node for name, node in pipeline.nodes.items() if isinstance(node, FilterNode)}
    first = next(iter(filters), "")
    for name, node in filters.items():
        place: Place = ("nodes", name)
        if name != first:
            message = f"a step is chosen once, and `{first}` does that; decide there, by a function of your own (`fn`)"
            findings.error(place, message, depends_on=[("nodes", first)])
            continue
        if node.fn is None:
            _check_bounds(pipeline, place, node, findings)
        else:
            _check_own_rule(place, node, findings)
        _check_rounds(pipeline, place, node, findings)
        if graph is not None:
            _check_place(pipeline, place, node, graph, findings)


def _check_place(pipeline: Pipeline, place: Place, node: FilterNode, graph: Graph, findings: Findings) -> None:
    found = rollouts(pipeline)
    if not found or leading_rollout(pipeline) not in graph.in_rounds:
        sampled = f"that `{leading_rollout(pipeline)}` samples" if found else "that is sampled"
        message = (
            f"it looks at nothing {sampled}, so that the prompts alone decide; choose them in the data set, or look at "
            "a column that depends on responses"
        )
        findings.error((*place, "fn" if node.fn else "metric"), message)


def _check_bounds(pipeline: Pipeline, place: Place, node: FilterNode, findings: Findings) -> None:
    if node.args:
        findings.error((*place, "args"), "they are for a function of your own, and there is no `fn`; take them out")
    column = CORE_COLUMNS.get(node.metric)
    if column is not None and column.shape is not Shape.SAMPLE:
        message = (
            f"`{node.metric}` is {column.shape.value}, and a filter looks at one number of each sample; choose such a "
            "column, as reward is"
        )
        findings.error((*place, "metric"), message)
    if node.lower is not None and node.upper is not None and node.lower >= node.upper:
        message = f"no mean is above {node.lower} and below {node.upper}; lower `lower`, or raise `upper`"
        findings.error((*place, "lower"), message, depends_on=[(*place, "upper")])
    found = rollouts(pipeline)
    if node.least_std is not None and found and found[leading_rollout(pipeline)].n == 1:
        message = (
            "a single response differs from nothing, so that no group would pass; raise the rollout's `n`, or decide "
            "by `lower` and `upper` alone"
        )
        where: Place = place if node.min_std is None else (*place, "min_std")
        findings.error(where, message, depends_on=[("nodes", leading_rollout(pipeline), "n")])


def _check_own_rule(place: Place, node: FilterNode, findings: Findings) -> None:
    others = [key for key in _BOUNDS if key in node.model_fields_set]
    if others:
        what = "it has" if len(others) == 1 else "they have"
        message = f"`fn` decides alone, so that {what} no effect; take {listed(others)} out"
        findings.error((*place, others[0]), message, depends_on=[(*place, "fn")])


def _check_rounds(pipeline: Pipeline, place: Place, node: FilterNode, findings: Findings) -> None:
    needed = pipeline.data.prompts_per_step
    if node.prompts_per_round and node.prompts_per_round * node.max_rounds < needed:
        message = (
            f"{node.max_rounds} rounds of {node.prompts_per_round} prompts do not make a step of {needed} "
            "(data.prompts_per_step) even where all pass; raise it"
        )
        findings.error(
            (*place, "prompts_per_round"),
            message,
            depends_on=[("data", "prompts_per_step"), (*place, "max_rounds")],
        )
