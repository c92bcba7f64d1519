"""Checks of teachers' prompts (`op: tell`): their template, their lengths, and incompatible rollouts."""

from __future__ import annotations

from collections.abc import Mapping

from dagrl.backends.families.sizes import ModelSizes
from dagrl.config.errors import Place, listed
from dagrl.config.loading.positions import Findings
from dagrl.config.schema import LogprobNode, MixNode, Pipeline, TellNode
from dagrl.graph.dag import Graph, Wire
from dagrl.validation.distillation import TAUGHT

_FACTS = {"demonstration": "demonstration", "peer_reward": "response", "feedback": "feedback"}
"""Option -> name of its text in the template."""


def check_telling(pipeline: Pipeline, findings: Findings) -> None:
    """Report nodes without added information, wrong templates, and rollouts with their own prompts."""
    for name, node in pipeline.nodes.items():
        if not isinstance(node, TellNode):
            continue
        place: Place = ("nodes", name)
        if not _given(node):
            message = "nothing is told; add `demonstration`, `peer_reward` or `feedback`"
            findings.error(place, message, "nothing-to-tell")
        elif problem := _problem_of(node):
            findings.error((*place, "template"), problem, "wrong-template", depends_on=[place])
        agents = [rollout for rollout, each in pipeline.rollouts.items() if each.agent is not None]
        if agents:
            fact = f"the agent of `{agents[0]}` writes its own prompts, and only those of the data set can be told more"
            findings.error(place, f"{fact}; remove one of the two", "told-agent")
        if node.peer_reward is not None and _alone(pipeline):
            message = "there is one response to each prompt, and no other to tell; set `n` of the rollout to 2 or more"
            findings.error((*place, "peer_reward"), message, "no-peers")
        if pipeline.data.image_key is not None:
            message = "prompts with images cannot be told more; remove it, or `data.image_key`"
            findings.error(place, message, "told-images")


def told_by(pipeline: Pipeline, name: str, graph: Graph | None) -> TellNode | None:
    """The `tell` node that writes the prompts of a node, if any."""
    wire = graph.nodes[name].inputs.get("prompt_tokens") if graph and name in graph.nodes else None
    node = pipeline.nodes.get(wire.node) if wire else None
    return node if isinstance(node, TellNode) else None


def check_told_lengths(pipeline: Pipeline, graph: Graph, sizes: Mapping[str, ModelSizes], findings: Findings) -> None:
    """Report prompts that no teacher reads, and prompts longer than the teacher's context."""
    for teller in _unheard(pipeline, graph):
        message = "its `teacher_mask` chooses the rows of a teacher that does not read its `teacher_prompt_tokens`"
        remedy = "add `read: {prompt_tokens: teacher_prompt_tokens}` to that node"
        findings.warning(("nodes", teller), f"{message}; {remedy}", "unread-prompts")
    for name, node in pipeline.nodes.items():
        told = told_by(pipeline, name, graph)
        if told is None or not isinstance(node, LogprobNode):
            continue
        teller = graph.nodes[name].inputs["prompt_tokens"].node
        of_model = sizes.get(node.engine or "")
        positions = of_model.positions if of_model else None
        longest = told.max_prompt_tokens + _longest_response(pipeline, name, graph)
        if positions is not None and longest > positions.value:
            message = (
                f"with the longest response a row of `{name}` has {longest} tokens, more than the model's "
                f"{positions.name}, {positions.value}; lower it"
            )
            findings.warning(
                ("nodes", teller, "max_prompt_tokens"), message, "sample-too-long", depends_on=[("model",)]
            )


def _unheard(pipeline: Pipeline, graph: Graph) -> list[str]:
    """`tell` nodes whose mask selects rows for teachers that do not read their prompts."""
    found: dict[str, None] = {}
    for node in graph.nodes.values():
        mask = node.inputs.get("teacher_mask")
        taught = {wire.node for column, wire in node.inputs.items() if column in TAUGHT}
        if mask is None or not taught or not isinstance(pipeline.nodes.get(mask.node), TellNode):
            continue
        behind = taught.union(*(graph.ancestors(teacher) for teacher in taught))
        told = Wire(mask.node, graph.nodes[mask.node].outputs["teacher_prompt_tokens"])
        if not any(told in graph.nodes[each].inputs.values() for each in behind):
            found[mask.node] = None
    return list(found)


def _alone(pipeline: Pipeline) -> bool:
    """Whether each prompt has one response."""
    if not pipeline.rollouts or any(isinstance(node, MixNode) for node in pipeline.nodes.values()):
        return False
    rollout = pipeline.rollouts[pipeline.leading_rollout]
    counts = [source.n or rollout.n for source in pipeline.data.sources.values()]
    return max(counts, default=rollout.n) * rollout.rows_per_sample == 1


def _longest_response(pipeline: Pipeline, name: str, graph: Graph) -> int:
    sampled_by = graph.sampled_by(name)
    if sampled_by is None:
        return pipeline.data.max_response_tokens or 0
    return max(sampling.max_new_tokens for sampling in pipeline.samplings(sampled_by, validated=False).values())


def _given(node: TellNode) -> list[str]:
    return [fact for option, fact in _FACTS.items() if getattr(node, option) is not None]


def _problem_of(node: TellNode) -> str | None:
    """The fault of a template."""
    from jinja2 import TemplateSyntaxError, meta
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment()
    try:
        # Names of filters and tests are checked when it is compiled.
        used = meta.find_undeclared_variables(environment.parse(node.template))
        template = environment.from_string(node.template)
    except TemplateSyntaxError as error:
        return f"line {error.lineno} is no Jinja: {str(error.message).rstrip('.')}; mend it"
    known = {"prompt", *_FACTS.values()}
    if unknown := sorted(used - known):
        return f"there is no `{unknown[0]}`; the names are {listed(sorted(known))}"
    if not used.intersection(_given(node)):
        return f"it leaves out what is told; add {{{{ {_given(node)[0]} }}}}"
    if node.message == "user" and "prompt" not in used:
        return "it takes the place of the user's message, which it leaves out; add {{ prompt }}"
    # A number, because templates may compute with their fields.
    values = dict.fromkeys(known, "") | dict.fromkeys(("prompt", *_given(node)), "1")
    try:
        template.render(values)
    except Exception as error:  # noqa: BLE001 - expressions raise errors of any kind
        return f"it cannot be filled in: {str(error).partition(chr(10))[0].rstrip('.')}; mend it"
    return None
