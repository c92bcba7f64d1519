"""Sizes of batches, mini-batches and micro-batches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dagrl.backends.families.sizes import ModelSizes
from dagrl.config.errors import Place, dotted
from dagrl.config.loading.positions import Findings
from dagrl.config.schema import DemonstrationNode, DpoNode, NodeBase, PackingNode, Pipeline, TrainingNode, UpdateNode
from dagrl.graph.dag import Graph, GraphNode
from dagrl.validation.telling import told_by


def check_batches(pipeline: Pipeline, graph: Graph | None, sizes: Mapping[str, ModelSizes], findings: Findings) -> None:
    """Report sizes that do not divide or fit; `graph` is None if it has problems."""
    for name, node in pipeline.nodes.items():
        if isinstance(node, TrainingNode):
            _check_mini_batches(pipeline, name, node, graph, findings)
    for name, packed in pipeline.packing_nodes.items():
        _check_micro_batch(pipeline, name, packed, graph, findings)
    _warn_of_long_samples(pipeline, sizes, findings)
    _warn_of_long_rows(pipeline, graph, sizes, findings)


def _check_mini_batches(
    pipeline: Pipeline, name: str, node: TrainingNode, graph: Graph | None, findings: Findings
) -> None:
    prompts = pipeline.data.prompts_per_step
    mini_batch = node.mini_batch or prompts
    place: Place = ("nodes", name, "mini_batch")
    if mini_batch > prompts:
        message = f"{mini_batch} prompts are more than a step has (data.prompts_per_step = {prompts}); lower it"
        findings.error(place, message, "mini-batch-too-large")
    elif prompts % mini_batch:
        message = f"{mini_batch} prompts do not divide data.prompts_per_step = {prompts}; choose a divisor"
        findings.error(place, message, "uneven-mini-batches")
        return
    updates = node.optimizer_steps(prompts)
    if updates > 1 and graph is not None and _lacks_old(node, graph.nodes[name]):
        remedy = f"add a node `{{op: logprob, engine: {node.engine}, write: old_logprob}}`"
        message = f"{updates} optimizer steps on one batch need the log-probs from before the first; {remedy}"
        blamed = place if mini_batch < prompts else ("nodes", name, "epochs")
        findings.error(blamed, message, "missing-old-logprob")


def _lacks_old(node: NodeBase, placed: GraphNode) -> bool:
    """Whether an update needs log-probs from before the step that no node computes."""
    compares = isinstance(node, UpdateNode) and node.loss.reads_old
    return compares and "old_logprob" in placed.contract.reads_if_written and "old_logprob" not in placed.inputs


@dataclass(frozen=True, slots=True)
class _Longest:
    """The longest rows that must be in one micro-batch."""

    tokens: int
    """Tokens of one row."""
    source: str
    """The keys that set it."""
    rows: int = 1


def _longest_of(pipeline: Pipeline, name: str, node: PackingNode, graph: Graph | None) -> list[_Longest]:
    """The longest rows of a node, or of each rollout if the node's rollout is unknown."""
    sampled_by = graph.sampled_by(name) if graph else None
    if sampled_by is None and graph is not None and pipeline.data.responses:
        source = "data.max_prompt_tokens + data.max_response_tokens"
        return [_Longest(pipeline.data.longest_demonstration, source, 2 if isinstance(node, DpoNode) else 1)]
    validated = pipeline.run.validates and graph is not None and name in graph.validation.nodes
    together = graph is not None and graph.nodes[name].contract.whole_groups
    told = told_by(pipeline, name, graph)
    prompt = "data.max_prompt_tokens"
    if told is not None and told.max_prompt_tokens > pipeline.data.max_prompt_tokens:
        prompt = "the longest teacher's prompt, max_prompt_tokens,"
    return [
        _Longest(
            tokens + max(0, (told.max_prompt_tokens if told else 0) - pipeline.data.max_prompt_tokens),
            f"{prompt} + {dotted(place)}.max_new_tokens",
            max(pipeline.ns.values()) if together else 1,
        )
        for rollout in ([sampled_by] if sampled_by else pipeline.rollouts)
        for place, tokens in pipeline.longest_rows(rollout, validated=validated).items()
    ]


def _check_micro_batch(
    pipeline: Pipeline, name: str, node: PackingNode, graph: Graph | None, findings: Findings
) -> None:
    if pipeline.engines[str(node.engine)].reads_messages:
        return  # The engine has another tokenizer, and puts a long row in a separate batch.
    multiple, engine = _row_alignment(pipeline, str(node.engine))
    for longest in _longest_of(pipeline, name, node, graph):
        whole, padded = longest.rows * longest.tokens, longest.rows * (-(-longest.tokens // multiple) * multiple)
        if node.tokens_per_micro_batch < padded:
            what, source = "sample", longest.source
            if longest.rows > 1:
                what, source = f"{longest.rows} samples of a prompt", f"{longest.rows} x ({source})"
            padding = f", padded to {padded} for the layout of `{engine}`" if padded > whole else ""
            fact = f"{node.tokens_per_micro_batch} tokens cannot hold the longest {what}, {whole} ({source}){padding}"
            place: Place = ("nodes", name, "tokens_per_micro_batch")
            depends: list[Place] = [("engines", engine, "parallel")]
            findings.error(place, f"{fact}; set it to {padded} or more", "micro-batch-too-small", depends_on=depends)


def _warn_of_long_samples(pipeline: Pipeline, sizes: Mapping[str, ModelSizes], findings: Findings) -> None:
    for rollout, node in pipeline.rollouts.items():
        positions = sizes[node.engine].positions if node.engine in sizes else None
        samplings = pipeline.samplings(rollout, validated=pipeline.run.validates)
        for section, longest in pipeline.longest_rows(rollout, validated=pipeline.run.validates).items():
            if positions is None or longest <= positions.value:
                continue
            new, place = samplings[section].max_new_tokens, (*section, "max_new_tokens")
            most = f"the model's {positions.name}, {positions.value}"
            engine = pipeline.engines.get(node.engine)
            if engine is not None and not engine.replicas_are_servers and new >= positions.value:
                message = f"{new} tokens after a prompt exceed {most}, which {engine.backend} refuses; lower it"
                findings.error(place, message, "sample-too-long", depends_on=[("model",), ("engines",)])
            else:
                message = f"with the longest prompt a sample has {longest} tokens, more than {most}; lower one of them"
                findings.warning(place, message, "sample-too-long", depends_on=[("model",)])


def _warn_of_long_rows(
    pipeline: Pipeline, graph: Graph | None, sizes: Mapping[str, ModelSizes], findings: Findings
) -> None:
    for name, node in pipeline.packing_nodes.items():
        engine = str(node.engine)
        positions = sizes[engine].positions if engine in sizes else None
        of_policy = pipeline.model_section(engine) == ("model",) and not isinstance(node, DemonstrationNode)
        of_policy = of_policy or pipeline.engines[engine].reads_messages
        if positions is None or of_policy or told_by(pipeline, name, graph) is not None:
            continue  # `telling` reports long prompts of teachers.
        longest = max((each.tokens for each in _longest_of(pipeline, name, node, graph)), default=0)
        if longest > positions.value:
            message = (
                f"the longest row has {longest} tokens, more than the model's {positions.name}, {positions.value}; "
                "use a model with a longer context, or lower the lengths of prompts and responses"
            )
            depends: list[Place] = [("engines", engine), ("model",), ("data",)]
            findings.warning(("nodes", name, "engine"), message, "sample-too-long", depends_on=depends)


def _row_alignment(pipeline: Pipeline, engine: str) -> tuple[int, str]:
    """The multiple to which rows are padded, and the engine whose layout sets it."""
    spec = pipeline.engines.get(engine)
    if spec is not None and spec.frozen_copy_of is not None:
        engine, spec = spec.frozen_copy_of, pipeline.engines.get(spec.frozen_copy_of)
    return (spec.packing.alignment if spec else 1), engine
