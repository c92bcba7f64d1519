"""The common part of the descriptors of backends with servers."""

from __future__ import annotations

import os
from abc import abstractmethod
from importlib.util import find_spec
from typing import TYPE_CHECKING

from dagrl.backends.backend import Backend, EngineCheck, EngineStart, WeightReader
from dagrl.backends.extra_fields import check_extra
from dagrl.backends.serving.client import ServerError
from dagrl.backends.serving.section import ROUTED_EXPERTS, ServerSpec
from dagrl.backends.serving.share import ServerShare
from dagrl.backends.tested import LibraryVersions
from dagrl.config.errors import removal
from dagrl.config.schema import LogprobNode, ModelSpec, Pipeline

if TYPE_CHECKING:
    from dagrl.backends.base import GenerateEngine

_DRIVER_PATIENCE = 0.95
"""Share of ``run.start_timeout_s`` after which the engine itself reports the reason for its wait."""


class ServerBackend[Spec: ServerSpec](Backend[Spec]):
    """A backend whose engines are servers."""

    section: type[Spec]
    tested: LibraryVersions

    @abstractmethod
    def start(self, model: ModelSpec, spec: Spec, share: ServerShare) -> GenerateEngine:
        """Start the processes of a server on this machine, and return the engine of the worker that starts them."""

    def validate(self, check: EngineCheck[Spec]) -> None:
        """Check the version of the library, if it is installed, and the fields of ``extra``."""
        engine, group = check.engine, check.pipeline.groups.get(check.engine.group or "")
        on_gpus = group is None or not group.is_cpu
        if problem := self.tested.problem(engine.environment, on_gpus=on_gpus, allow_untested=engine.allow_untested):
            place = (*check.place, "environment" if engine.environment else "backend")
            check.findings.error(place, problem, "untested-version", depends_on=[("groups",)])
        if group is not None and group.is_elastic and engine.nodes_per_server(group) > 1:
            message = removal(f"a server of `{check.place[-1]}` takes several machines")
            check.findings.error(("groups", str(engine.group), "min_nodes"), message, "not-elastic")
        check_extra(check)

    def weight_reader(self, engine: Spec) -> WeightReader | None:
        """Servers read their model's folder, quantised or not, unless options of ``server`` change this."""
        if engine.weights_from is not None:
            return None
        checked = not {"load_format", "quantization"} & engine.server.keys()
        return WeightReader(strict=False, quantised=True, checked=checked)

    def build(self, start: EngineStart) -> GenerateEngine:
        """One slot of a server: its first worker represents it, the first on a further machine starts processes."""
        pipeline, ranks = start.pipeline, start.ranks
        spec = section_to_start(pipeline, start.name)
        assert isinstance(spec, self.section)
        if find_spec(self.requires[0]) is None:
            raise ServerError(f"{self.tested.title} is not installed; {self.tested.remedy}")
        if problem := self.tested.problem(None, on_gpus=bool(start.gpus), allow_untested=spec.allow_untested):
            raise ServerError(problem)
        group = pipeline.groups[str(spec.group)]
        slot = spec.slots(group)[ranks.rank]
        if ranks.listen_fd is not None:
            # The server's processes listen on this port.
            os.close(ranks.listen_fd)
        if not slot.starts:
            from dagrl.backends.serving.held_slot import HeldSlot

            return HeldSlot()
        if start.gpus:
            # CUDA reads this when it starts: the processes need all devices of the server.
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(start.gpus)
        share = ServerShare(
            name=f"{start.name}/{slot.server}",
            server=slot.server,
            node=slot.node,
            nodes=spec.nodes_per_server(group),
            gpus=start.gpus,
            ranks=ranks,
            logs=start.run_dir / "logs",
            start_timeout_s=_DRIVER_PATIENCE * pipeline.run.start_timeout_s,
            sleeps=pipeline.sleeps(start.name),
            scored_top_k=_scored_top_k(pipeline, start.name),
            adapter=pipeline.engines[spec.weights_from].sent_adapter if spec.weights_from else None,
        )
        return self.start(start.model, spec, share)


def _scored_top_k(pipeline: Pipeline, name: str) -> int | None:
    scorers = (node for node in pipeline.nodes.values() if isinstance(node, LogprobNode) and node.engine == name)
    return max((node.top_k or 0 for node in scorers), default=None)


def section_to_start(pipeline: Pipeline, name: str) -> ServerSpec:
    """The section, with ``enable_return_routed_experts`` where a trainer replays routes."""
    spec = pipeline.engines[name]
    assert isinstance(spec, ServerSpec)
    if not pipeline.wants_routed_experts(name):
        return spec
    return spec.model_copy(update={"server": {**spec.server, ROUTED_EXPERTS: True}})
