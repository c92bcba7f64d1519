"""Memory of vLLM's servers: they fill ``gpu_memory_utilization`` of each GPU, or have a cache of given size."""

from __future__ import annotations

from dagrl.backends.planning.memory import CONTEXT, GIB, EngineMemory
from dagrl.backends.planning.planned_engine import PlannedEngine
from dagrl.backends.vllm.section import CPU_CACHE_GIB, VllmEngineSpec, utilization_of

_RUNTIME = CONTEXT + 3 * GIB
"""CUDA's context, libraries, activations and graphs; half of it stays in a sleep, measured with 1.7B on an H200."""
_LEAST_CACHE_TOKENS = 16384
"""With fewer a server spends its time waiting for space in the cache."""


def server_memory(engine: PlannedEngine[VllmEngineSpec]) -> EngineMemory:
    """Return the memory of a server's fullest GPU; without a GPU the host's."""
    shape, spec, sleeps = engine.shape, engine.spec, engine.executor.sleeps
    if engine.gpu is None:
        weights = 4 * shape.parameters
        return EngineMemory({"weights": weights, "cache": CPU_CACHE_GIB * GIB}, "rollout", weights, 0)
    weights = weights_on_a_gpu(engine)
    filled = int(engine.gpu.memory_bytes * utilization_of(spec, sleeps=sleeps))
    cache = spec.server.get("kv_cache_memory_bytes", max(filled - weights - _RUNTIME, 0))
    least = max(engine.work.longest, _LEAST_CACHE_TOKENS) * cache_bytes_per_token(engine)
    return EngineMemory(
        awake={"weights": weights, "cache": cache, "runtime": _RUNTIME},
        moment="rollout",
        weights_alone=weights + 2 * engine.work.bucket_bytes + CONTEXT,
        asleep=CONTEXT + GIB,
        # Weights that no other engine sends again wait on the host.
        host=weights if sleeps and engine.work.keeps_weights else 0,
        needs=weights + least + _RUNTIME,
        filled_by="kv_cache_memory_bytes" if "kv_cache_memory_bytes" in spec.server else "gpu_memory_utilization",
    )


def weights_on_a_gpu(engine: PlannedEngine[VllmEngineSpec]) -> int:
    """Bytes of weights on one GPU of a server, linear layers in fp8 or 16 bits; copies of attention share experts."""
    shape, spec = engine.shape, engine.spec
    experts = sum(shape.layer(index).experts for index in shape.positions)
    value = 1 if spec.taken_fp8 else 2
    others = 2 * (shape.parameters - experts) - (2 - value) * (shape.matrices - experts)
    return others // spec.tensor_size + value * experts // spec.gpus_per_server


def cache_value_bytes(engine: PlannedEngine[VllmEngineSpec]) -> int:
    in_fp8 = str(engine.spec.server.get("kv_cache_dtype")).startswith("fp8")
    return 4 if engine.gpu is None else 1 if in_fp8 else 2


def cache_bytes_per_token(engine: PlannedEngine[VllmEngineSpec]) -> int:
    """Bytes of one token's keys and values on one GPU of a server."""
    value = cache_value_bytes(engine)
    shape, tensor = engine.shape, engine.spec.tensor_size
    # A key head that several GPUs share, and latent attention, are whole on each of them.
    parts = 1 if shape.latent else min(tensor, shape.key_value_heads)
    return value * shape.cache_values_per_token * shape.layers // parts
