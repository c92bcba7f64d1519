"""Descriptor of ``backend: endpoint``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dagrl.backends.backend import Backend, EngineCheck, EngineStart, WeightReader
from dagrl.backends.endpoint.section import EndpointEngineSpec
from dagrl.config.schema import TokenizerSpec

if TYPE_CHECKING:
    from dagrl.backends.base import GenerateEngine


class EndpointBackend(Backend[EndpointEngineSpec]):
    """Models behind OpenAI endpoints."""

    name = "endpoint"
    summary = "a model behind an OpenAI endpoint, for evaluations"
    requires = ("openai",)

    def validate(self, check: EngineCheck[EndpointEngineSpec]) -> None:
        if check.engine.weights_from is not None:
            message = "an endpoint takes no weights; remove it, and all that is trained: an endpoint is for evaluations"
            check.findings.error((*check.place, "weights_from"), message)
        tokenizer = check.pipeline.model.tokenizer
        if not isinstance(tokenizer, TokenizerSpec) or tokenizer.kind != "messages":
            message = "an endpoint reads messages; set model.tokenizer to {kind: messages}"
            check.findings.error((*check.place, "backend"), message)
        for name, node in check.pipeline.rollouts.items():
            if node.engine == check.name and (node.has_tools or node.environment):
                message = "needs the model's tokens, which an endpoint does not give; use an agent"
                check.findings.error(("nodes", name, "tools" if node.has_tools else "environment"), message)

    def weight_reader(self, engine: EndpointEngineSpec) -> WeightReader | None:
        return None

    def build(self, start: EngineStart) -> GenerateEngine:
        from dagrl.backends.endpoint.engine import EndpointEngine

        return EndpointEngine(start.section(EndpointEngineSpec), start.model)


BACKEND = EndpointBackend()
