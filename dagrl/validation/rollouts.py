"""Rollouts and filters: over-sampling, partial rollouts, tools and environments, dynamic sampling."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from dagrl.backends.environments import faults
from dagrl.backends.registry import backends
from dagrl.config.errors import Place, listed, removal, suggest
from dagrl.config.loading.positions import Findings
from dagrl.config.schema import FilterNode, MixNode, Pipeline, RolloutNode, TurnOptions, UpdateNode
from dagrl.config.schema.rounds import prompts_per_round
from dagrl.graph.dag import PROMPTS_NODE, Graph
from dagrl.plugins.custom import parameters_of
from dagrl.plugins.environment import environment_fields
from dagrl.plugins.isolation import ask
from dagrl.plugins.tool import check_tool, load_tool, tool_name
from dagrl.validation.agents import check_agent_of, no_program, which

_ONLY_ALONE = ("over_sampling_batch_size", "partial_rollout")


def check_rollouts(pipeline: Pipeline, folder: Path, findings: Findings) -> None:
    """Report options of rollouts and filters that contradict each other; `folder` holds the user's modules."""
    rollouts = pipeline.rollouts
    for name, node in rollouts.items():
        _check_prompts_begun(pipeline, name, node, findings, alone=len(rollouts) == 1)
        if node.multi_turn:
            _check_turns(pipeline, name, node, folder, findings)
        elif unused := [key for key in TurnOptions.model_fields if key in node.model_fields_set]:
            remedy = "set `tools`, `environment` or `agent`"
            message = f"nothing answers the policy, so {listed(unused)} has no effect; {remedy}"
            findings.error(("nodes", name, unused[0]), message, "turns-without-tools")
    _check_filters(pipeline, findings)


def check_rollouts_in_graph(pipeline: Pipeline, graph: Graph, findings: Findings) -> None:
    """Report rollouts, filters and updates that read the wrong prompts or samples."""
    rollouts = pipeline.rollouts
    for name, node in rollouts.items():
        reads_source = graph.nodes[name].inputs["prompt_tokens"].node == PROMPTS_NODE
        if node.max_prompt_tokens is not None and reads_source:
            findings.superfluous(("nodes", name, "max_prompt_tokens"), "data.max_prompt_tokens bounds these prompts")
        _check_same_tools(pipeline, name, findings, reads_source=reads_source)
        if len(rollouts) > 1:
            _check_several(pipeline, name, node, graph, findings)
        elif node.over_sampling_batch_size is not None:
            _check_others_wait(name, graph, findings)
    for name, update in pipeline.nodes.items():
        if isinstance(update, UpdateNode):
            _warn_of_foreign_samples(pipeline, name, update, graph, findings)
    if graph.filter and not (rollouts and pipeline.leading_rollout in graph.in_rounds):
        message = "reads nothing that depends on responses; select prompts in the data set, or read such a column"
        key = "fn" if "fn" in pipeline.nodes[graph.filter].model_fields_set else "metric"
        findings.error(("nodes", graph.filter, key), message, "filter-without-responses")


def _check_prompts_begun(pipeline: Pipeline, name: str, node: RolloutNode, findings: Findings, *, alone: bool) -> None:
    place: Place = ("nodes", name)
    needed, begun = prompts_per_round(pipeline), node.over_sampling_batch_size
    if begun is not None and begun <= needed:
        example = needed + max(1, needed // 4)
        message = f"{begun} prompts are not more than a step takes ({needed}); choose more, for example {example}"
        findings.error((*place, "over_sampling_batch_size"), message, "over-sampling-too-small")
    if node.partial_rollout and begun is None and alone:
        message = "no response is left unfinished, as a step waits for all prompts; set `over_sampling_batch_size`"
        findings.error((*place, "partial_rollout"), message, "partial-without-over-sampling")
    for option in _ONLY_ALONE:
        if getattr(node, option) and not alone:
            message = removal("is not supported with several rollouts")
            findings.error((*place, option), message, "several-rollouts")


def _check_tools(name: str, node: RolloutNode, folder: Path, findings: Findings) -> None:
    place: Place = ("nodes", name)
    names: list[str] = []
    for number, tool in enumerate(node.tools):
        where: Place = (*place, "tools", number)
        if tool_name(tool) in names:
            message = f"there is already a tool `{tool_name(tool)}`; give tools different names"
            findings.error(where, message, "duplicate-tool")
        names.append(tool_name(tool))
        args = node.tool_args.get(tool_name(tool), {})
        with findings.reporting(where, "invalid-tool"):
            if ":" in tool:
                ask(tool, check_tool, tool, args, folder=folder)
            else:
                load_tool(tool, args)
    for unknown in [key for key in node.tool_args if key not in names]:
        findings.unknown((*place, "tool_args", unknown), "tool", unknown, names)
    _check_servers(place, node, folder, findings)


def _check_servers(place: Place, node: RolloutNode, folder: Path, findings: Findings) -> None:
    for name, spec in node.mcp_servers.items():
        where: Place = (*place, "mcp_servers", name)
        if find_spec("mcp") is None:
            findings.error(where, "needs the package mcp; pip install 'dagrl[mcp]'", "missing-package")
        if (spec.command is None) == (spec.url is None):
            findings.error(
                where,
                "has not exactly one way to reach it; give it either a `command` or a `url`",
                "server-without-command",
            )
        elif spec.command is not None and which(spec.command[0], folder) is None:
            findings.error((*where, "command"), no_program(spec.command[0], folder), "invalid-command")


def _check_tool_format(pipeline: Pipeline, name: str, node: RolloutNode, folder: Path, findings: Findings) -> None:
    where: Place = ("nodes", name, "tool_format")
    tool_format = node.tool_format
    if ":" in tool_format:
        with findings.reporting(where, "invalid-tool-format"):
            ask(tool_format, parameters_of, tool_format, folder=folder)
        return
    engine = pipeline.engines.get(node.engine)
    environment = engine.environment if engine else None
    # The workers of the rollout may run in an environment without the packages of a backend.
    kinds = backends().values()
    usable = [kind for kind in kinds if not environment or "package-missing" not in dict(faults(environment, kind))]
    known = ["hermes", *(name for kind in usable for name in kind.tool_formats())]
    if tool_format not in known:
        message = f"there is no format `{tool_format}` (write your own as `module:function`)"
        findings.error(where, f"{message}; {suggest(tool_format, known)}", "invalid-tool-format")


def _check_turns(pipeline: Pipeline, name: str, node: RolloutNode, folder: Path, findings: Findings) -> None:
    place: Place = ("nodes", name)
    if node.agent is not None:
        check_agent_of(pipeline, name, node, folder, findings)
    else:
        _check_tools(name, node, folder, findings)
        if node.environment is not None:
            with findings.reporting((*place, "environment"), "invalid-environment"):
                ask(node.environment, environment_fields, node.environment, node.environment_args, folder=folder)
    if node.agent is not None or node.has_tools:
        _check_tool_format(pipeline, name, node, folder, findings)
    if node.tool_timeout_s >= (silence := pipeline.run.node_timeout_s):
        message = f"a worker that waits for tools is silent, for at most run.node_timeout_s = {silence:g}; lower it"
        findings.error((*place, "tool_timeout_s"), message, "tool-timeout-too-long")
    for mix in [key for key, other in pipeline.nodes.items() if isinstance(other, MixNode)]:
        message = f"responses of the data set have no turns; remove what answers the policy in `{name}`, or this node"
        findings.error(("nodes", mix), message, "mix-with-turns")


def _check_same_tools(pipeline: Pipeline, name: str, findings: Findings, *, reads_source: bool) -> None:
    leading = pipeline.leading_rollout
    tools_of = {rollout: (*node.tools, *node.mcp_servers) for rollout, node in pipeline.rollouts.items()}
    described = tools_of[leading]
    if reads_source and set(tools_of[name]) != set(described):
        tools = listed(described) if described else "no tools"
        message = f"it reads the same prompts as `{leading}`, which describe {tools}; give both rollouts the same tools"
        findings.error(("nodes", name, "tools"), message, "different-tools")


def _check_others_wait(rollout: str, graph: Graph, findings: Findings) -> None:
    for name in graph.in_rounds or graph.nodes:
        if name != rollout and graph.ancestors(name) == {PROMPTS_NODE}:
            message = (
                f"it reads prompts that over-sampling leaves out; read a column of `{rollout}`, such as `finish_reason`"
            )
            findings.error(("nodes", name), message, "reads-unsampled-prompts")


def _check_several(pipeline: Pipeline, name: str, node: RolloutNode, graph: Graph, findings: Findings) -> None:
    leading, rollouts = pipeline.leading_rollout, pipeline.rollouts
    behind = next((other for other in rollouts if other in graph.ancestors(name)), None)
    if behind and node.n > 1:
        message = removal(f"it answers each row of `{behind}` once", key="n")
        findings.error(("nodes", name, "n"), message, "different-rows")
    elif not behind and node.n != rollouts[leading].n:
        rows = rollouts[leading].n
        message = f"all columns of a step have the same rows, and `{leading}` samples {rows} a prompt; set `n: {rows}`"
        findings.error(("nodes", name, "n"), message, "different-rows")


def _warn_of_foreign_samples(pipeline: Pipeline, name: str, node: UpdateNode, graph: Graph, findings: Findings) -> None:
    rollout = graph.sampled_by(name)
    sampler = pipeline.engines.get(pipeline.rollouts[rollout].engine) if rollout else None
    source = getattr(sampler, "weights_from", None)
    corrected = node.rollout_correction is not None or node.takes_rollout_for_old
    if source is not None and source != node.engine and not corrected and node.loss.policy != "opmd":
        remedy = "sample with its own weights, or set `read: {old_logprob: rollout_logprob}`"
        message = f"`{node.engine}` trains on samples of `{source}` as if they were its own; {remedy}"
        findings.warning(("nodes", name), message, "foreign-samples", depends_on=[("engines",)])


def _check_filters(pipeline: Pipeline, findings: Findings) -> None:
    filters = [(name, node) for name, node in pipeline.nodes.items() if isinstance(node, FilterNode)]
    for name, _ in filters[1:]:
        message = f"`{filters[0][0]}` filters already; combine both rules in your own function (`fn`)"
        findings.error(("nodes", name), message, "several-filters")
    if not filters:
        return
    name, node = filters[0]
    place: Place = ("nodes", name)
    if node.fn is None:
        _check_bounds(pipeline, place, node, findings)
        for source in node.by_source:
            _check_interval((*place, "by_source", source), node.bounds_of(source), findings)
    needed = pipeline.data.prompts_per_step
    if node.prompts_per_round and node.prompts_per_round * node.max_rounds < needed:
        prompts = f"{node.max_rounds} rounds of {node.prompts_per_round} prompts"
        message = f"{prompts} are fewer than data.prompts_per_step = {needed}; raise it"
        findings.error((*place, "prompts_per_round"), message, "too-few-prompts")


def _check_interval(place: Place, node: FilterNode, findings: Findings) -> None:
    if node.lower is not None and node.upper is not None and node.lower >= node.upper:
        message = f"no mean is above {node.lower} and below {node.upper}; lower `lower`, or raise `upper`"
        findings.error((*place, "lower"), message, "crossed-bounds")


def _check_bounds(pipeline: Pipeline, place: Place, node: FilterNode, findings: Findings) -> None:
    _check_interval(place, node, findings)
    alone = [source for source, n in pipeline.ns.items() if n == 1] if pipeline.rollouts else []
    if any(node.bounds_of(source).least_std is not None for source in alone):
        message = "the standard deviation of one response is 0, so no group passes; raise the rollout's `n`"
        where: Place = place if node.min_std is None else (*place, "min_std")
        findings.error(where, message, "group-too-small")
