"""Descriptor of ``backend: vllm``."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from dagrl.backends.backend import EngineCheck
from dagrl.backends.planning.memory import EngineMemory
from dagrl.backends.planning.planned_engine import PlannedEngine
from dagrl.backends.serving.fp8_rules import ServerSplit, check_fp8
from dagrl.backends.serving.server_backend import ServerBackend
from dagrl.backends.serving.share import ServerShare
from dagrl.backends.vllm.costs import VllmCosts
from dagrl.backends.vllm.memory import server_memory
from dagrl.backends.vllm.rules import check_servers
from dagrl.backends.vllm.section import VllmEngineSpec
from dagrl.backends.vllm.versions import TESTED
from dagrl.config.schema import GroupSpec, ModelSpec
from dagrl.model_files.library_classes import source_of

if TYPE_CHECKING:
    from dagrl.backends.base import GenerateEngine

_MODELS = re.compile(r"^_(?:TEXT_GENERATION|MULTIMODAL|TRANSFORMERS_SUPPORTED)_MODELS.*?^\}", re.DOTALL | re.M)


class VllmBackend(ServerBackend[VllmEngineSpec]):
    """vLLM servers."""

    name = "vllm"
    summary = "vLLM servers: generates and judges; see docs/vllm.md for its environment"
    requires = ("vllm",)
    section = VllmEngineSpec
    tested = TESTED

    def validate(self, check: EngineCheck[VllmEngineSpec]) -> None:
        """Engine arguments, the place of servers, and the length of samples."""
        super().validate(check)
        check_servers(check)
        check_fp8(check, _split(check.engine), packs_blocks=False)

    def architectures(self, environment: Path | None) -> set[str]:
        source = source_of("vllm", "model_executor/models/registry.py", environment) or ""
        return {name for block in _MODELS.findall(source) for name in re.findall(r'^\s+"(\w+)": ?\(', block, re.M)}

    def start(self, model: ModelSpec, spec: VllmEngineSpec, share: ServerShare) -> GenerateEngine:
        from dagrl.backends.vllm.engine import VllmEngine

        return VllmEngine(model, spec, share)

    def memory(self, engine: PlannedEngine[VllmEngineSpec]) -> EngineMemory:
        return server_memory(engine)

    def costs(self, engine: PlannedEngine[VllmEngineSpec]) -> VllmCosts:
        return VllmCosts(engine)

    def suits_machines(self, engine: VllmEngineSpec, group: GroupSpec) -> bool:
        return group.slots_per_node % engine.gpus_per_server == 0


def _split(engine: VllmEngineSpec) -> ServerSplit:
    tensor = engine.tensor_size
    experts = 1 if engine.server.get("enable_expert_parallel") else engine.gpus_per_server
    return ServerSplit("tensor_parallel_size", attention=tensor, mlp=tensor, experts=experts)


BACKEND = VllmBackend()
