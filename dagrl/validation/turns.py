"""Rollouts of several turns: whether those who are to answer are there, and whether anything else contradicts them."""

from __future__ import annotations

from pathlib import Path

from dagrl.backends.registry import backends
from dagrl.config.errors import Place, listed, suggest
from dagrl.config.loading.positions import Findings
from dagrl.config.schema import MixNode, Pipeline, RolloutNode, TurnOptions
from dagrl.graph.dag import PROMPTS_NODE, Graph
from dagrl.graph.plugins.custom import check_function
from dagrl.graph.plugins.environment import environment_fields
from dagrl.graph.plugins.isolation import ask
from dagrl.graph.plugins.tool import check_tool, load_tool, tool_name
from dagrl.graph.rollouts import leading_rollout, rollouts

_OF_TOOLS = ("tool_args", "tool_format", "max_parallel_calls")
_OF_ENVIRONMENTS = ("environment_args", "on_environment_error")


def check_turns(pipeline: Pipeline, graph: Graph | None, folder: Path, findings: Findings) -> None:
    """Report what is wrong with tools and environments; `folder` holds the user's own modules."""
    for name, node in rollouts(pipeline).items():
        place: Place = ("nodes", name)
        _check_useless(place, node, findings)
        if graph is not None:
            _check_prompts(pipeline, name, graph, findings)
        if node.multi_turn:
            _check_expected(place, node, findings)
            _check_tools(place, node, folder, findings)
            _check_environment(place, node, folder, findings)
            _check_others(pipeline, place, node, findings)


def _check_useless(place: Place, node: RolloutNode, findings: Findings) -> None:
    """Options of what is not there."""
    for option in TurnOptions.model_fields:
        if option not in node.model_fields_set or option in ("tools", "environment"):
            continue
        if not node.multi_turn:
            missing = "`tools` or an `environment`"
        elif option in _OF_TOOLS and not node.tools:
            missing = "`tools`"
        elif option in _OF_ENVIRONMENTS and node.environment is None:
            missing = "an `environment`"
        else:
            continue
        message = f"without {missing} it has nothing to say; add that, or take it out"
        findings.error((*place, option), message, depends_on=[(*place, "tools"), (*place, "environment")])


def _check_expected(place: Place, node: RolloutNode, findings: Findings) -> None:
    if node.expected_turns is None:
        return
    where: Place = (*place, "expected_turns")
    if node.expected_turns > node.max_turns:
        message = (
            f"{node.expected_turns:g} turns are more than a response may take, {node.max_turns} (max_turns); lower"
        )
        findings.error(where, f"{message} it", depends_on=[(*place, "max_turns")])
    elif node.expected_call_s is None:
        message = "the plan has no use for it without `expected_call_s`; add that, or take it out"
        findings.error(where, message, depends_on=[(*place, "expected_call_s")])


def _check_tools(place: Place, node: RolloutNode, folder: Path, findings: Findings) -> None:
    names: list[str] = []
    for number, tool in enumerate(node.tools):
        where: Place = (*place, "tools", number)
        if tool_name(tool) in names:
            findings.error(where, f"there is a tool `{tool_name(tool)}` already; a policy knows tools by their names")
        names.append(tool_name(tool))
        args = node.tool_args.get(tool_name(tool), {})
        try:
            if ":" in tool:
                ask(tool, check_tool, tool, args, folder=folder)
            else:
                load_tool(tool, args)
        except ValueError as error:
            findings.error(where, str(error))
    for name in node.tool_args if names else ():
        if name not in names:
            findings.error((*place, "tool_args", name), f"there is no tool `{name}` here; {suggest(name, names)}")
    if node.tools:
        _check_format(place, node.tool_format, folder, findings)


def _check_format(place: Place, tool_format: str, folder: Path, findings: Findings) -> None:
    where: Place = (*place, "tool_format")
    if ":" in tool_format:
        try:
            ask(tool_format, check_function, tool_format, folder=folder)
        except ValueError as error:
            findings.error(where, str(error))
        return
    known = ["hermes", *(name for backend in backends().values() for name in backend.tool_formats())]
    if tool_format not in known:
        message = f"there is no format `{tool_format}` (your own is written `module:function`); "
        findings.error(where, message + suggest(tool_format, known))


def _check_environment(place: Place, node: RolloutNode, folder: Path, findings: Findings) -> None:
    if node.environment is None:
        return
    try:
        ask(node.environment, environment_fields, node.environment, node.environment_args, folder=folder)
    except ValueError as error:
        findings.error((*place, "environment"), str(error))


def _check_others(pipeline: Pipeline, place: Place, node: RolloutNode, findings: Findings) -> None:
    if node.partial_rollout:
        message = "a response whose partner has to be met again cannot go on in a later step; take it out"
        findings.error((*place, "partial_rollout"), message)
    if node.tool_timeout_s >= pipeline.run.node_timeout_s:
        message = (
            f"a worker may be silent for {pipeline.run.node_timeout_s:g} s at most (run.node_timeout_s), and says "
            "nothing while all wait for tools; lower this, or raise that"
        )
        findings.error((*place, "tool_timeout_s"), message, depends_on=[("run", "node_timeout_s")])
    mixed = [name for name, other in pipeline.nodes.items() if isinstance(other, MixNode)]
    if mixed:
        message = f"experts' responses have no turns; take `tools` and `environment` out of `{place[1]}`, or this out"
        findings.error(("nodes", mixed[0]), message)


def _check_prompts(pipeline: Pipeline, name: str, graph: Graph, findings: Findings) -> None:
    """The prompts of the data set tell of one rollout's tools."""
    leading = leading_rollout(pipeline)
    mine, told = (rollouts(pipeline)[each].tools for each in (name, leading))
    reads_source = graph.nodes[name].inputs["prompt_tokens"].node == PROMPTS_NODE
    if name != leading and reads_source and set(mine) != set(told):
        what = listed(told) if told else "no tools"
        message = (
            f"it reads the same prompts as `{leading}`, and those tell of {what}; give both the same tools, or let a "
            "node write its prompts"
        )
        findings.error(("nodes", name, "tools"), message, depends_on=[("nodes", leading, "tools")])
