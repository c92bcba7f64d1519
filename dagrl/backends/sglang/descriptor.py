"""Descriptor of ``backend: sglang``."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dagrl.backends.backend import Backend, EngineCheck, EngineStart, WeightReader
from dagrl.backends.extra_fields import check_extra
from dagrl.backends.families.shape import ModelShape
from dagrl.backends.planning.changes import Ladder, Room
from dagrl.backends.planning.memory import EngineMemory
from dagrl.backends.planning.planned_engine import PlannedEngine
from dagrl.backends.serving.fp8_rules import ServerSplit, check_fp8
from dagrl.backends.sglang.costs import SglangCosts
from dagrl.backends.sglang.layout import ROUTED_EXPERTS, gpus_per_server, nodes_per_server, server_slots
from dagrl.backends.sglang.layouts import ANY_LAYOUT, SglangLayout, ladders, layouts
from dagrl.backends.sglang.memory import server_memory
from dagrl.backends.sglang.section import SglangEngineSpec
from dagrl.backends.sglang.server_rules import check_server
from dagrl.backends.sglang.tool_parsers import parser_names, tool_parser
from dagrl.backends.tool_calls import Parser
from dagrl.config.schema import EngineSpec, GroupSpec, Pipeline

if TYPE_CHECKING:
    from dagrl.backends.base import GenerateEngine

_DRIVER_PATIENCE = 0.95
"""Share of ``run.start_timeout_s`` after which the engine reports first what it has waited for."""


class SglangBackend(Backend):
    """SGLang servers."""

    name = "sglang"
    summary = "SGLang servers: generates and judges"
    requires = ("sglang",)
    any_layout = ANY_LAYOUT

    def validate(self, check: EngineCheck[Any]) -> None:
        """Fields of ServerArgs, the place of servers, their model, and the route of new weights."""
        check_extra(check)
        check_server(check)
        check_fp8(check, _split(check.engine), packs_blocks=True)

    def weight_reader(self, engine: EngineSpec) -> WeightReader | None:
        """Servers read their model's folder, quantised or not, unless ``server`` says how to read it."""
        assert isinstance(engine, SglangEngineSpec)
        if engine.weights_from is not None:
            return None
        checked = not {"load_format", "quantization"} & engine.server.keys()
        return WeightReader(strict=False, quantised=True, checked=checked)

    def tool_formats(self) -> tuple[str, ...]:
        """Names of SGLang's parsers; none if it is not installed."""
        return tuple(parser_names())

    def tool_parser(self, name: str, schemas: Sequence[Mapping[str, Any]]) -> Parser:
        """One of SGLang's parsers."""
        return tool_parser(name, schemas)

    def build(self, start: EngineStart) -> GenerateEngine:
        """One slot of a server: its first worker speaks for it, the first on a further machine starts processes."""
        spec = section_to_start(start.pipeline, start.name)
        from dagrl.backends.serving.held_slot import HeldSlot
        from dagrl.backends.sglang.engine import SglangEngine
        from dagrl.backends.sglang.share import ServerShare
        from dagrl.backends.sglang.slot import NodeShare

        pipeline, ranks = start.pipeline, start.ranks
        group = pipeline.groups[str(spec.group)]
        slot = server_slots(spec.server, group)[ranks.rank]
        if ranks.listen_fd is not None:
            # SGLang's processes listen on this port.
            os.close(ranks.listen_fd)
        if not slot.starts:
            return HeldSlot()
        if start.gpus:
            # CUDA reads this when it starts: SGLang's processes need all devices of the server.
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(start.gpus)
        share = ServerShare(
            name=f"{start.name}/{slot.server}",
            server=slot.server,
            node=slot.node,
            nodes=nodes_per_server(spec.server, group),
            gpus=start.gpus,
            address=ranks.master_addr,
            port=ranks.master_port,
            logs=start.run_dir / "logs",
            start_timeout_s=_DRIVER_PATIENCE * pipeline.run.start_timeout_s,
        )
        kind = SglangEngine if slot.leads else NodeShare
        adapter = pipeline.engines[spec.weights_from].sent_adapter if spec.weights_from else None
        return kind(start.model, spec, ranks, share, sleeps=pipeline.sleeps(start.name), adapter=adapter)

    def memory(self, engine: PlannedEngine[SglangEngineSpec]) -> EngineMemory:
        return server_memory(engine.shape, engine.spec, engine.gpu, engine.work)

    def costs(self, engine: PlannedEngine[SglangEngineSpec]) -> SglangCosts:
        return SglangCosts(engine)

    def changes(self, engine: PlannedEngine[SglangEngineSpec], room: Room) -> Iterable[Ladder]:
        return ladders(engine, room)

    def suits_machines(self, engine: EngineSpec, group: GroupSpec) -> bool:
        assert isinstance(engine, SglangEngineSpec)
        each, size = group.gpus_per_node or group.cpus_per_node, gpus_per_server(engine.server)
        return each % size == 0 or size % each == 0

    def layouts(self, pipeline: Pipeline, shapes: Sequence[ModelShape], group: GroupSpec) -> Iterable[SglangLayout]:
        return layouts(shapes, group)


def _split(engine: SglangEngineSpec) -> ServerSplit:
    server = engine.server
    tensor = int(server.get("tp_size", 1))
    copies = int(server.get("dp_size", 1)) if server.get("enable_dp_attention") else 1
    experts = max(1, tensor // int(server.get("ep_size", 1)))
    return ServerSplit("tp_size", attention=max(1, tensor // copies), mlp=tensor, experts=experts)


def section_to_start(pipeline: Pipeline, name: str) -> SglangEngineSpec:
    """The section, with ``enable_return_routed_experts`` where a trainer replays routes."""
    spec = pipeline.engines[name]
    assert isinstance(spec, SglangEngineSpec)
    if not pipeline.wants_routed_experts(name):
        return spec
    return spec.model_copy(update={"server": {**spec.server, ROUTED_EXPERTS: True}})


BACKEND = SglangBackend()
