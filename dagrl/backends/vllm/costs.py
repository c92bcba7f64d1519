"""Seconds of vLLM servers."""

from __future__ import annotations

from functools import cached_property

from dagrl.backends.planning.costs import ServerCosts
from dagrl.backends.planning.decoding import Server, cache_delay
from dagrl.backends.planning.planned_engine import PlannedEngine
from dagrl.backends.vllm.memory import cache_bytes_per_token, cache_value_bytes, server_memory, weights_on_a_gpu
from dagrl.backends.vllm.section import VllmEngineSpec

_MOST_RUNNING = 1024
_LARGEST_GRAPH = 512
"""vLLM's defaults on GPUs of 70 GiB or more."""
_PAGE = 16
"""Default of ``block_size``: tokens of a block of the cache."""
SAMPLING_PASSES = 6
"""Times that its kernels read or write the logits, about."""
LOGPROB_S = 7.3e-6
TOKEN_S = 4.5e-6 + LOGPROB_S
"""Seconds of vLLM's scheduler for one token with its log-prob. 512 responses of 1.7B on an H200 ran at 26,110 tokens/s
with log-probs and at 32,301 without."""


class VllmCosts(ServerCosts):
    """Seconds of one engine of vLLM servers."""

    engine: PlannedEngine[VllmEngineSpec]
    # vLLM has no log-probs of tokens in its cache.
    scores_share_prompts = False

    @property
    def weight_bytes(self) -> float:
        return weights_on_a_gpu(self.engine)

    @cached_property
    def server(self) -> Server:
        engine = self.engine
        fields, gpus, copies = engine.spec.server, engine.spec.gpus_per_server, engine.spec.attention_copies
        cache = server_memory(engine).awake["cache"]
        running = int(fields.get("max_num_seqs", _MOST_RUNNING))
        value = cache_value_bytes(engine)
        return Server(
            engine.shape,
            self.device,
            tensor=gpus,
            stages=1,
            per_node=engine.per_node,
            running=running * copies,
            fp8=engine.spec.fp8_granularity,
            cache_bytes=value,
            cache_delay=cache_delay(value, int(fields.get("block_size", _PAGE))),
            cache_tokens=max(1, copies * cache // cache_bytes_per_token(engine)),
            largest_graph=0 if fields.get("enforce_eager", engine.gpu is None) else min(2 * running, _LARGEST_GRAPH),
            shares_prompts=copies == 1 and fields.get("enable_prefix_caching", True),
            response_s=TOKEN_S,
            sampling_passes=SAMPLING_PASSES,
        )
