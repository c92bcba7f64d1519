"""Seconds of vLLM servers."""

from __future__ import annotations

from functools import cached_property

from dagrl.backends.costs import WEIGHT_BYTES, EngineCosts
from dagrl.backends.decoding import Server
from dagrl.backends.planned_engine import PlannedEngine
from dagrl.backends.vllm.memory import cache_bytes_per_token, server_memory
from dagrl.backends.vllm.section import VllmEngineSpec

_MOST_RUNNING = 1024
_LARGEST_GRAPH = 512
"""vLLM's defaults on GPUs of 70 GiB or more."""


class VllmCosts(EngineCosts):
    """Seconds of one engine of vLLM servers."""

    engine: PlannedEngine[VllmEngineSpec]

    @property
    def weight_bytes(self) -> float:
        return self.parameters * WEIGHT_BYTES / self.engine.spec.gpus_per_server

    @cached_property
    def server(self) -> Server:
        engine = self.engine
        fields, gpus = engine.spec.server, engine.spec.gpus_per_server
        cache = server_memory(engine).awake["cache"]
        running = int(fields.get("max_num_seqs", _MOST_RUNNING))
        return Server(
            engine.shape,
            self.device,
            tensor=gpus,
            stages=1,
            per_node=engine.per_node,
            running=running,
            cache_tokens=max(1, cache // cache_bytes_per_token(engine)),
            largest_graph=0 if fields.get("enforce_eager", engine.gpu is None) else min(2 * running, _LARGEST_GRAPH),
            shares_prompts=fields.get("enable_prefix_caching", True),
        )
