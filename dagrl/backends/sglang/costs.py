"""Seconds of SGLang servers."""

from __future__ import annotations

from functools import cached_property

from dagrl.backends.planning.costs import WEIGHT_BYTES, ServerCosts
from dagrl.backends.planning.decoding import TORCH_PASSES, Server, cache_delay
from dagrl.backends.planning.planned_engine import PlannedEngine, Workload
from dagrl.backends.sglang.layout import FUSED
from dagrl.backends.sglang.memory import cache_tokens, cache_value_bytes, largest_graph, server_memory
from dagrl.backends.sglang.section import SglangEngineSpec

_MOST_RUNNING = 2048
OWN_PASSES = 1
"""Times that dagrl's sampler reads the logits of a step."""


class SglangCosts(ServerCosts):
    """Seconds of one engine of SGLang servers."""

    engine: PlannedEngine[SglangEngineSpec]

    @property
    def weight_bytes(self) -> float:
        spec, shape = self.engine.spec, self.engine.shape
        matrices = shape.matrices if spec.taken_fp8 else 0
        return (self.parameters * WEIGHT_BYTES - matrices) / spec.gpus_per_server

    @cached_property
    def server(self) -> Server:
        engine = self.engine
        fields, shape = engine.spec.server, engine.shape
        own = engine.gpu is not None and fields.get("sampling_backend", FUSED) == FUSED
        memory = server_memory(shape, engine.spec, engine.gpu, Workload(sleeps=engine.executor.sleeps))
        value = cache_value_bytes(engine.spec, on_gpu=engine.gpu is not None)
        return Server(
            shape,
            self.device,
            tensor=engine.spec.gpus_per_server // engine.spec.stages,
            stages=engine.spec.stages,
            per_node=engine.per_node,
            running=int(fields.get("max_running_requests") or _MOST_RUNNING),
            fp8=engine.spec.fp8_granularity,
            cache_bytes=value,
            cache_delay=cache_delay(value, engine.spec.page_size),
            cache_tokens=max(1, cache_tokens(shape, engine.spec, memory, on_gpu=engine.gpu is not None)),
            largest_graph=0 if fields.get("disable_cuda_graph") else largest_graph(fields),
            shares_prompts=not fields.get("disable_radix_cache"),
            sampling_passes=OWN_PASSES if own else TORCH_PASSES,
        )
