"""Descriptor of ``backend: sglang``."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dagrl.backends.backend import EngineCheck
from dagrl.backends.families.shape import ModelShape
from dagrl.backends.planning.changes import Ladder, Room
from dagrl.backends.planning.memory import EngineMemory
from dagrl.backends.planning.planned_engine import PlannedEngine
from dagrl.backends.serving.fp8_rules import ServerSplit, check_fp8
from dagrl.backends.serving.server_backend import ServerBackend
from dagrl.backends.serving.share import ServerShare
from dagrl.backends.sglang.costs import SglangCosts
from dagrl.backends.sglang.layouts import ANY_LAYOUT, SglangLayout, ladders, layouts
from dagrl.backends.sglang.memory import server_memory
from dagrl.backends.sglang.section import SglangEngineSpec
from dagrl.backends.sglang.server_rules import check_server
from dagrl.backends.sglang.tool_parsers import parser_names, tool_parser
from dagrl.backends.sglang.versions import TESTED
from dagrl.backends.tool_calls import Parser
from dagrl.config.schema import GroupSpec, ModelSpec, Pipeline
from dagrl.model_files.library_classes import folders_of

if TYPE_CHECKING:
    from dagrl.backends.base import GenerateEngine

_ENTRY_CLASSES = re.compile(r"^EntryClass\b[^=]*=\s*(\[[^\]]*\]|\w+)", re.MULTILINE)


class SglangBackend(ServerBackend[SglangEngineSpec]):
    """SGLang servers."""

    name = "sglang"
    summary = "SGLang servers: generates and judges"
    requires = ("sglang",)
    section = SglangEngineSpec
    any_layout = ANY_LAYOUT
    tested = TESTED

    def validate(self, check: EngineCheck[SglangEngineSpec]) -> None:
        """Fields of ServerArgs, the place of servers, their model, and the route of new weights."""
        super().validate(check)
        check_server(check)
        check_fp8(check, _split(check.engine), packs_blocks=True)

    def architectures(self, environment: Path | None) -> set[str]:
        files = (path for folder in folders_of("sglang", environment) for path in folder.glob("srt/models/*.py"))
        classes = (text for path in files for text in _ENTRY_CLASSES.findall(path.read_text(encoding="utf-8")))
        return {name for text in classes for name in re.findall(r"\w+", text)}

    def tool_formats(self) -> tuple[str, ...]:
        return tuple(parser_names())

    def tool_parser(self, name: str, schemas: Sequence[Mapping[str, Any]]) -> Parser:
        return tool_parser(name, schemas)

    def start(self, model: ModelSpec, spec: SglangEngineSpec, share: ServerShare) -> GenerateEngine:
        from dagrl.backends.serving.held_slot import HeldSlot
        from dagrl.backends.sglang.engine import SglangEngine, start_server

        return HeldSlot(start_server(model, spec, share)) if share.node else SglangEngine(model, spec, share)

    def memory(self, engine: PlannedEngine[SglangEngineSpec]) -> EngineMemory:
        return server_memory(engine.shape, engine.spec, engine.gpu, engine.work)

    def costs(self, engine: PlannedEngine[SglangEngineSpec]) -> SglangCosts:
        return SglangCosts(engine)

    def changes(self, engine: PlannedEngine[SglangEngineSpec], room: Room) -> Iterable[Ladder]:
        return ladders(engine, room)

    def suits_machines(self, engine: SglangEngineSpec, group: GroupSpec) -> bool:
        per_node, size = group.slots_per_node, engine.gpus_per_server
        return per_node % size == 0 or size % per_node == 0

    def layouts(self, pipeline: Pipeline, shapes: Sequence[ModelShape], group: GroupSpec) -> Iterable[SglangLayout]:
        return layouts(shapes, group)


def _split(engine: SglangEngineSpec) -> ServerSplit:
    tensor = engine.tensor_size
    return ServerSplit("tp_size", engine.attention_size, tensor, experts=max(1, tensor // engine.size("ep_size")))


BACKEND = SglangBackend()
