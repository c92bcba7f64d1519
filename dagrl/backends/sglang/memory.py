"""Memory of SGLang's servers, by their own accounting.

Checked with SGLang 0.5.17: ``mem_fraction_static`` is the share of the memory free at the start that weights and cache
may take (``KVCacheConfigurator._profile_available_bytes``); graphs and activations take the rest.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from dagrl.backends.families.shape import ModelShape
from dagrl.backends.planning.gpus import Gpu
from dagrl.backends.planning.memory import CONTEXT, GIB, EngineMemory
from dagrl.backends.planning.planned_engine import Workload
from dagrl.backends.sglang.layout import CPU_CACHE_TOKENS, LARGEST_GRAPH, SLEEPER_FRACTION
from dagrl.backends.sglang.section import SglangEngineSpec

_MIB = 2**20
_GRAPH_MIB = 2
"""For each request of the largest graph; SGLang's ``reserve_for_graph_mb``."""
_PREFILL_MIB = 1.5
"""For each token of a prefill; SGLang's reserve for activations."""
_LIBRARIES = int(1.0 * GIB)
"""Kernels, workspaces and samplers, which stay in a sleep. Measured on H200s, context included: 1.1 to 1.5 GiB for 1.7B
on one GPU, 2.2 on two."""
_WORKING = int(2.0 * GIB)
"""Memory of passes and CUDA's part of graphs besides the other kinds, freed in a sleep. With all of the above H200s had
1.8 GiB for 1.7B on one GPU, 3.6 for 1.7B and 8B on two, 5.5 for 8B on one."""
_NCCL = int(0.8 * GIB)
"""Buffers of the ranks of one server, including SGLang's all-reduce. An estimate."""
_LEAST_CACHE_TOKENS = 16384
"""With fewer a server spends its time waiting for space in the cache."""


def server_memory(shape: ModelShape, engine: SglangEngineSpec, gpu: Gpu | None, work: Workload) -> EngineMemory:
    """Return the memory of a server's fullest GPU, in the first pipeline stage; without a `gpu` the host's."""
    fields = engine.server
    value = 4 if fields.get("dtype", "float32" if gpu is None else "bfloat16") in ("float32", "float") else 2
    in_fp8 = engine.taken_fp8 or str(fields.get("quantization", "")).endswith("fp8")
    weights = _weights(shape, engine, value, 1 if in_fp8 else value)
    per_token = cache_bytes_per_token(shape, engine, on_gpu=gpu is not None)
    least = max(work.longest, _LEAST_CACHE_TOKENS) * per_token
    bound = fields.get("max_total_tokens") or (CPU_CACHE_TOKENS if gpu is None else None)
    if gpu is None:
        return EngineMemory({"weights": weights, "cache": int(bound or 0) * per_token}, "rollout", weights, 0)
    begins = CONTEXT + (_NCCL if engine.gpus_per_server > 1 else 0)
    stays = begins + _LIBRARIES
    runtime = stays + _WORKING
    fraction = fraction_of(engine, gpu, sleeps=work.sleeps)
    # SGLang measures this before it loads anything; the fraction is for weights and cache.
    free = gpu.memory_bytes - begins
    cache = int(free * fraction) - weights
    notes = () if "mem_fraction_static" in fields else (f"mem_fraction_static is {fraction:.3g}, as it is not given",)
    if bound is not None:
        cache = min(cache, int(bound) * per_token)
    graphs, passing = _graphs(fields), _activations(shape, engine, gpu, value)
    buffers = 0 if work.sleeps else 2 * work.bucket_bytes
    needed = weights + min(least, int(bound) * per_token if bound else least) + graphs + passing + buffers + runtime
    return EngineMemory(
        awake={
            "weights": weights,
            "cache": max(cache, 0),
            "graphs": graphs,
            "activations": passing,
            "buffers": buffers,
            "runtime": runtime,
        },
        moment="rollout",
        weights_alone=weights + 2 * work.bucket_bytes + stays,
        asleep=stays,
        # Weights that no other engine sends again wait on the host.
        host=weights if work.sleeps and work.keeps_weights else 0,
        needs=needed,
        filled_by="mem_fraction_static",
        notes=notes,
    )


def fraction_of(engine: SglangEngineSpec, gpu: Gpu, *, sleeps: bool) -> float:
    """Return a server's ``mem_fraction_static``: the file's, dagrl's for a server that sleeps, or SGLang's choice.

    SGLang leaves space for the activations of a prefill and for graphs.
    """
    fields = engine.server
    if fields.get("mem_fraction_static") is not None:
        return float(fields["mem_fraction_static"])
    if sleeps:
        return SLEEPER_FRACTION
    total = gpu.memory_bytes / _MIB
    reserved = 512 + max(_prefill_tokens(fields, gpu), 2048) * _PREFILL_MIB + _graphs(fields) / _MIB
    reserved += engine.tensor_size * engine.stages / 8 * 1024
    if total > 60 * 1024:
        reserved = max(reserved, 10 * 1024)
    return round((total - reserved) / total, 3)


def cache_tokens(shape: ModelShape, engine: SglangEngineSpec, memory: EngineMemory, *, on_gpu: bool = True) -> int:
    """Return the capacity of one server's cache in tokens."""
    per_token = cache_bytes_per_token(shape, engine, on_gpu=on_gpu)
    return memory.awake.get("cache", 0) // max(per_token, 1)


def cache_value_bytes(engine: SglangEngineSpec, *, on_gpu: bool = True) -> int:
    kind = str(engine.server.get("kv_cache_dtype", "auto"))
    if kind == "auto" and engine.server.get("dtype") in ("float32", "float"):
        return 4
    return 1 if kind.startswith("fp8") else 2 if kind.startswith("bf") or on_gpu else 4


def cache_bytes_per_token(shape: ModelShape, engine: SglangEngineSpec, *, on_gpu: bool = True) -> int:
    """Return the bytes on one GPU: keys and values of its heads, of which it has at least one, in its layers."""
    value = cache_value_bytes(engine, on_gpu=on_gpu)
    layers = math.ceil(shape.layers / engine.stages)
    if shape.latent:
        return shape.cache_values_per_token * value * layers
    heads = math.ceil(shape.key_value_heads / engine.attention_size)
    return 2 * heads * shape.head_dim * value * layers


def _weights(shape: ModelShape, engine: SglangEngineSpec, value: int, matrices: int) -> int:
    """Return the weights of the first stage, with the embedding; the last stage has an output layer of that size.

    A value has `value` bytes, in the linear layers `matrices`.
    """
    layers = math.ceil(shape.layers / engine.stages)
    split, tensor = engine.attention_size, engine.tensor_size
    total = 0
    for index in range(layers):
        layer = shape.layer(index)
        attention = layer.attention
        if shape.latent is None:
            # A key head that several ranks share is whole on each of them.
            missing = math.ceil(shape.key_value_heads / split) * split - shape.key_value_heads
            attention += 2 * missing * shape.head_dim * shape.hidden
        else:
            # The matrices that expand keys and values have a second copy, laid out for decoding.
            attention += shape.latent.key_rank * shape.heads * (shape.latent.plain_dim + shape.latent.value_dim)
        total += matrices * (attention // split + layer.mlp // tensor + layer.experts // tensor)
        total += value * layer.whole
    # SGLang pads rows to a multiple of 64.
    vocabulary = math.ceil(shape.vocabulary / 64) * 64 * shape.hidden // split
    outputs = 0 if shape.tied or engine.stages > 1 else vocabulary
    return total + value * (vocabulary + outputs + shape.final_norm)


def _graphs(fields: Mapping[str, Any]) -> int:
    """Return SGLang's estimate for the capture of decoding."""
    if fields.get("disable_cuda_graph") or fields.get("cuda_graph_backend_decode") == "disabled":
        return 0
    return _GRAPH_MIB * _MIB * largest_graph(fields)


def largest_graph(fields: Mapping[str, Any]) -> int:
    """Return the running requests up to which decoding has graphs."""
    most = fields.get("max_running_requests") or LARGEST_GRAPH
    return int(fields.get("cuda_graph_max_bs_decode") or min(most, LARGEST_GRAPH))


def _prefill_tokens(fields: Mapping[str, Any], gpu: Gpu) -> int:
    """Return ``chunked_prefill_size``, whose default depends on the size of the GPU."""
    if fields.get("chunked_prefill_size"):
        given = int(fields["chunked_prefill_size"])
        return given if given > 0 else int(fields.get("max_prefill_tokens") or 16384)
    bounds = ((35, 2048), (60, 4096), (160, 8192))
    return next((tokens for gib, tokens in bounds if gpu.memory_gib < gib), 16384)


def _activations(shape: ModelShape, engine: SglangEngineSpec, gpu: Gpu, value: int) -> int:
    """Return the bytes of a prefill's widest layer, or of the float32 logits of a batch and a copy of them."""
    widest = 2 * shape.dense_width / engine.tensor_size
    if shape.experts is not None:
        experts = shape.experts
        routed = experts.chosen * (shape.hidden + 3 * experts.width / engine.tensor_size)
        widest = max(widest, routed)
    prefill = _prefill_tokens(engine.server, gpu) * value * (3 * shape.hidden + 1.5 * widest)
    logits = 3 * 4 * largest_graph(engine.server) * shape.vocabulary
    return int(max(prefill, logits))
