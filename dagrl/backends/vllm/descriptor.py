"""Descriptor of ``backend: vllm``."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from dagrl.backends.backend import Backend, EngineCheck, EngineStart, WeightReader
from dagrl.backends.extra_fields import check_extra
from dagrl.backends.planning.memory import EngineMemory
from dagrl.backends.planning.planned_engine import PlannedEngine
from dagrl.backends.serving.fp8_rules import ServerSplit, check_fp8
from dagrl.backends.serving.slots import slots_of_servers
from dagrl.backends.vllm.costs import VllmCosts
from dagrl.backends.vllm.memory import server_memory
from dagrl.backends.vllm.rules import check_servers
from dagrl.backends.vllm.section import ROUTED_EXPERTS, VLLM_VERSION, VllmEngineSpec
from dagrl.config.schema import EngineSpec, GroupSpec, Pipeline

if TYPE_CHECKING:
    from dagrl.backends.base import GenerateEngine

_DRIVER_PATIENCE = 0.95
"""Share of ``run.start_timeout_s`` after which the engine reports first what it has waited for."""


class VllmBackend(Backend):
    """vLLM servers."""

    name = "vllm"
    summary = "vLLM servers: generates and judges; see docs/vllm.md for its environment"
    requires = ("vllm",)
    release = VLLM_VERSION

    def validate(self, check: EngineCheck[Any]) -> None:
        """Engine arguments, the place of servers, and the length of samples."""
        check_extra(check)
        check_servers(check)
        check_fp8(check, _split(check.engine), packs_blocks=False)

    def weight_reader(self, engine: EngineSpec) -> WeightReader | None:
        """Servers read their model's folder unless they take another engine's weights."""
        assert isinstance(engine, VllmEngineSpec)
        if engine.weights_from is not None:
            return None
        checked = not {"load_format", "quantization"} & engine.server.keys()
        return WeightReader(strict=False, quantised=True, checked=checked)

    def build(self, start: EngineStart) -> GenerateEngine:
        """One slot of a server: its first worker runs vLLM's engine."""
        spec = section_to_start(start.pipeline, start.name)
        slot = slots_of_servers(spec.gpus_per_server, start.pipeline.groups[str(spec.group)])[start.ranks.rank]
        if start.ranks.listen_fd is not None:
            # vLLM's processes listen on this port.
            os.close(start.ranks.listen_fd)
        if not slot.leads:
            from dagrl.backends.serving.held_slot import HeldSlot

            return HeldSlot()
        if start.gpus:
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(start.gpus)
        from dagrl.backends.vllm.engine import VllmEngine

        return VllmEngine(
            start.model,
            spec,
            start.ranks,
            name=f"{start.name}/{slot.server}",
            gpus=start.gpus,
            log=start.run_dir / "logs" / f"{start.name}-{slot.server}.log",
            start_timeout_s=_DRIVER_PATIENCE * start.pipeline.run.start_timeout_s,
            sleeps=start.pipeline.sleeps(start.name),
            adapter=start.pipeline.engines[spec.weights_from].sent_adapter if spec.weights_from else None,
        )

    def memory(self, engine: PlannedEngine[VllmEngineSpec]) -> EngineMemory:
        return server_memory(engine)

    def costs(self, engine: PlannedEngine[VllmEngineSpec]) -> VllmCosts:
        return VllmCosts(engine)

    def suits_machines(self, engine: EngineSpec, group: GroupSpec) -> bool:
        assert isinstance(engine, VllmEngineSpec)
        return (group.gpus_per_node or group.cpus_per_node) % engine.gpus_per_server == 0


def _split(engine: VllmEngineSpec) -> ServerSplit:
    tensor = engine.tensor_size
    experts = 1 if engine.server.get("enable_expert_parallel") else engine.gpus_per_server
    return ServerSplit("tensor_parallel_size", attention=tensor, mlp=tensor, experts=experts)


def section_to_start(pipeline: Pipeline, name: str) -> VllmEngineSpec:
    """The section, with ``enable_return_routed_experts`` where a trainer replays routes."""
    spec = pipeline.engines[name]
    assert isinstance(spec, VllmEngineSpec)
    if not pipeline.wants_routed_experts(name):
        return spec
    return spec.model_copy(update={"server": {**spec.server, ROUTED_EXPERTS: True}})


BACKEND = VllmBackend()
