"""PPO: that a critic is there where values are needed, that it learns, and that nothing waits for one in vain."""

from __future__ import annotations

from dagrl.config.errors import Place, listed
from dagrl.config.loading.positions import Findings
from dagrl.config.schema import CriticNode, Pipeline, UpdateNode, ValuesNode
from dagrl.graph.dag import Graph


def check_critic(pipeline: Pipeline, graph: Graph | None, findings: Findings) -> None:
    """Report what a critic's nodes say in vain; `graph` is None where columns are not sorted out yet."""
    trained = {node.engine: name for name, node in pipeline.nodes.items() if isinstance(node, CriticNode)}
    for name, node in pipeline.nodes.items():
        place: Place = ("nodes", name)
        if isinstance(node, UpdateNode) and node.critic_warmup:
            _check_warmup(pipeline, (*place, "critic_warmup"), node, findings, has_critic=bool(trained))
        elif isinstance(node, CriticNode) and graph is not None:
            _check_own_values(name, node, graph, findings)
        elif isinstance(node, ValuesNode) and node.engine not in trained:
            message = f"nothing trains the critic `{node.engine}`; add a node `{{op: critic, engine: {node.engine}}}`"
            findings.warning((*place, "engine"), message, depends_on=[("engines", node.engine)])


def _check_warmup(pipeline: Pipeline, place: Place, node: UpdateNode, findings: Findings, *, has_critic: bool) -> None:
    if not has_critic:
        message = "there is no critic that could learn meanwhile; add a node `{op: critic, ...}`, or take it out"
        findings.error(place, message)
    elif node.critic_warmup >= pipeline.run.steps:
        message = f"the policy would never be trained: the run has {pipeline.run.steps} steps (run.steps); lower it"
        findings.error(place, message, depends_on=[("run", "steps")])


def _check_own_values(name: str, node: CriticNode, graph: Graph, findings: Findings) -> None:
    """Report a critic that is trained towards returns, and clipped around values, of another one."""
    wire = graph.nodes[name].inputs["value"]
    written_by = graph.nodes[wire.node].spec
    if isinstance(written_by, ValuesNode) and written_by.engine != node.engine:
        own = [other for other, each in graph.nodes.items() if _values_of(each.spec, node.engine)]
        remedy = (
            f"read those of {listed(own)} (`read: {{value: {own[0]}.value}}`)" if own else "name one engine in both"
        )
        message = f"it trains `{node.engine}`, and its values are those of `{written_by.engine}`; {remedy}"
        findings.error(("nodes", name, "engine"), message, depends_on=[("nodes", wire.node)])


def _values_of(node: object, engine: str) -> bool:
    return isinstance(node, ValuesNode) and node.engine == engine
