"""Checks of nodes that query a model, on an engine or behind an endpoint, and of log-probs from servers."""

from __future__ import annotations

import os
from collections.abc import Mapping
from urllib.parse import urlsplit

from dagrl.backends.families.sizes import ModelSizes
from dagrl.backends.serving.section import ServerSpec
from dagrl.config.errors import Place, dotted
from dagrl.config.loading.positions import Findings
from dagrl.config.schema import LogprobNode, Pipeline
from dagrl.config.schema.nodes.base import EndpointNode
from dagrl.graph.dag import Graph


def check_scorers(pipeline: Pipeline, graph: Graph | None, sizes: Mapping[str, ModelSizes], findings: Findings) -> None:
    """Report log-probs that a server or an endpoint cannot compute; `graph` is None if it has problems."""
    for name, node in pipeline.nodes.items():
        if not isinstance(node, LogprobNode):
            continue
        place: Place = ("nodes", name)
        if not check_source(place, node, findings):
            continue
        engine = pipeline.engines.get(node.engine or "")
        if node.endpoint is not None or isinstance(engine, ServerSpec):
            _check_outputs(place, node, findings)
        if node.endpoint is not None:
            _check_samples(pipeline, graph, name, "endpoint", findings)
        elif isinstance(engine, ServerSpec):
            _check_servers(pipeline, (name, node), engine, sizes, findings)
            _check_samples(pipeline, graph, name, "engine", findings)


def check_source(place: Place, node: EndpointNode, findings: Findings) -> bool:
    """Check that a node names either an engine or an endpoint."""
    if (node.engine is None) == (node.endpoint is None):
        message = f"the {node.op} needs one source; name an `engine` of this pipeline, or an `endpoint` and its `model`"
        findings.error(place, message, f"{node.op}-source")
        return False
    if node.endpoint is not None:
        _check_endpoint(place, node, node.endpoint, findings)
    return True


def _check_endpoint(place: Place, node: EndpointNode, address: str, findings: Findings) -> None:
    where: Place = (*place, "endpoint")
    if not node.model:
        findings.error(where, "the endpoint's model is not named; add `model: NAME`", f"{node.op}-model")
    try:
        parts = urlsplit(address)
        if not parts.hostname:
            raise ValueError("it has no host")
    except ValueError as error:
        message = f"is no valid address: {error}; write for example http://host:8000/v1"
        findings.error(where, message, "invalid-address")
        return
    if "@" in parts.netloc or parts.query:
        message = "the address contains a secret, which the run folder would show; use api_key_env"
        findings.error(where, message, "secret-in-address")
    if node.api_key_env and not os.environ.get(node.api_key_env):
        message = f"the environment variable {node.api_key_env} is not set here; set it where the run's workers start"
        findings.warning((*place, "api_key_env"), message, "unset-variable")


def _check_servers(
    pipeline: Pipeline,
    named: tuple[str, LogprobNode],
    engine: ServerSpec,
    sizes: Mapping[str, ModelSizes],
    findings: Findings,
) -> None:
    name, node = named
    place: Place = ("nodes", name, "engine")
    if (source := engine.weights_from) is not None:
        message = f"`{node.engine}` has the weights of `{source}`, so its log-probs are the policy's own"
        remedy = f"name `{source}`, or servers without `weights_from` and with a separate `model`"
        findings.error(place, f"{message}; {remedy}", "scores-itself", depends_on=[("engines", str(node.engine))])
        return
    if "tokens_per_micro_batch" in node.model_fields_set:
        where: Place = ("nodes", name, "tokens_per_micro_batch")
        findings.superfluous(where, f"the servers of `{node.engine}` form batches themselves")
    size = sizes.get(str(node.engine))
    positions = size.positions if size else None
    longest = pipeline.longest_scored(node) + engine.scored_tokens_kept_back
    if positions is not None and engine.context_field not in engine.server and longest > positions.value:
        fact = f"`{node.engine}` reads up to {positions.value} tokens ({positions.name})"
        message = f"{fact}, and the longest prompt and response have {longest}; use a teacher with a longer context"
        depends: list[Place] = [("engines", str(node.engine)), ("model",), ("data",)]
        findings.error(place, f"{message}, or lower their lengths", "context-too-short", depends_on=depends)


def _check_outputs(place: Place, node: LogprobNode, findings: Findings) -> None:
    who = "an endpoint" if node.endpoint else "a server"
    for option, given in (("candidates", node.candidates), ("statistics", node.statistics)):
        if given:
            message = f"{who} does not return these; name an engine of megatron"
            findings.error((*place, option), message, "no-such-output")


def _check_samples(pipeline: Pipeline, graph: Graph | None, name: str, key: str, findings: Findings) -> None:
    place: Place = ("nodes", name, key)
    if pipeline.data.image_key is not None:
        message = "log-probs of prompts with images come from the trainer's backend only; name an engine of megatron"
        findings.error(place, message, "no-images", depends_on=[("data", "image_key")])
    sampled_by = graph.sampled_by(name) if graph else None
    for rollout in [sampled_by] if sampled_by else pipeline.rollouts:
        for section, sampling in pipeline.samplings(rollout, validated=False).items():
            # Greedy samples are scored at 1.
            if sampling.temperature not in (0, 1):
                where = f"{dotted(section)}.temperature"
                fact = f"it computes log-probs at temperature 1, and samples are drawn at {sampling.temperature:g}"
                message = f"{fact} ({where}); set that to 1, or name an engine of megatron"
                findings.error(place, message, "other-temperature", depends_on=[(*section, "temperature")])
                return
