"""Seconds of generation: prefill by operations, decoding by the bytes that each step reads.

A step of a server reads its weights and the keys and values of all responses in the batch, multiplies, draws tokens,
and passes them to the host. Responses end one by one and are replaced, until the last one ends. The simulation proceeds
from one end of a response to the next, not token by token.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass
from functools import lru_cache

from dagrl.backends.families.flops import model_flops
from dagrl.backends.families.shape import ModelShape
from dagrl.backends.planning.device_rates import DeviceRates
from dagrl.config.fp8_weights import Granularity

_BYTES = 2
TORCH_PASSES = 21
"""Times that torch's functions, a dozen, read or write float32 logits for tokens and their log-probs. This and the next
three are fitted to the rollouts of tests/planner/cost/test_measured.py, of 16 to 512 responses at a time."""
_STEP_S = 1.1e-3
"""Seconds of the host between two steps, during which the GPU waits."""
RESPONSE_S = 4.8e-6
"""Seconds of the host for each response in a step, with its log-prob."""
_SHARED_PROMPT_SHARE = 0.75
"""Share of a prompt's keys and values that is read if several responses share it: the GPU's cache has a part of
them."""
_REDUCTION_S = 10e-6
"""Start of an all-reduce within a step; two in each layer."""
_WITHOUT_GRAPH_S = 0.4e-3
"""A layer whose kernels are launched one by one: 512 responses beyond the largest graph ran at 19.8k instead of 34.3k
tokens/s."""
_PREFILL_SHARE = 0.7
"""Share of the rate of training's products, in chunks of some thousand tokens, without a graph."""
_SCORING_PASSES = 4
"""Times that float32 logits are written and read for log-probs of given tokens. An estimate."""
_HF_LAYER_S = {True: 0.9e-3, False: 0.35e-3}
"""A layer of the Python of Transformers, on a GPU and on a CPU: typical, not measured."""
_FP8_CACHE_DELAY, _FP8_PAGES_DELAY, _LARGE_PAGE = 1.95, 1.6, 64
"""FlashAttention 3 reads a cache in fp8 in about the time of one in bfloat16, in 0.8 of it where pages are large."""
_BUNDLES = 128
"""Most bundles in which the responses of one server are simulated, unless there are more shards."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens of the rows of a rollout.

    Responses are spread between 0 and the longest that is allowed: a share ``(x / longest) ** a`` of them is shorter
    than x, with `a` chosen for the mean. A mean of half the longest is an even spread; a mean of the longest means that
    all are cut. The longest responses always approach the limit, and a rollout waits for them.
    """

    prompt: float
    """Mean."""
    response: float
    """Mean."""
    longest: int

    @property
    def row(self) -> float:
        return self.prompt + self.response

    @property
    def mean_square(self) -> float:
        """Mean of the square of a row's tokens, for attention; all prompts count as the mean."""
        return self.prompt**2 + 2 * self.prompt * self.response + self._square_of_responses

    @property
    def varied(self) -> bool:
        return self.response < self.longest

    def quantile(self, share: float) -> float:
        """Return the length below which the given share of the responses lies."""
        if not self.varied:
            return float(self.longest)
        return max(1.0, self.longest * share ** (1 / self._shape))

    @property
    def _shape(self) -> float:
        """The exponent `a`; the mean is ``a / (a + 1)`` of the longest."""
        return self.response / (self.longest - self.response)

    @property
    def _square_of_responses(self) -> float:
        if not self.varied:
            return float(self.longest) ** 2
        return self._shape / (self._shape + 2) * self.longest**2


def cache_delay(value_bytes: float, page_size: int) -> float:
    """Return the factor by which reading bytes of a cache takes longer than other bytes, for the size of its values."""
    if value_bytes > 1:
        return 1.0
    return _FP8_PAGES_DELAY if page_size >= _LARGE_PAGE else _FP8_CACHE_DELAY


@dataclass(frozen=True, slots=True)
class Server:
    """One copy of the model that generates."""

    shape: ModelShape
    device: DeviceRates
    tensor: int = 1
    """GPUs that share each layer."""
    stages: int = 1
    per_node: int = 1
    """GPUs on a machine."""
    running: int = 512
    """Most responses that are decoded together."""
    cache_tokens: float = float("inf")
    """Tokens whose keys and values fit."""
    largest_graph: int = 512
    """Responses up to which a step is one CUDA graph; 0 without graphs."""
    shares_prompts: bool = True
    """Whether responses to one prompt read it once, from a radix cache."""
    response_s: float = RESPONSE_S
    """Seconds of the host for each response in a step."""
    sampling_passes: float = TORCH_PASSES
    """Times that logits are read or written for tokens and their log-probs."""
    fp8: Granularity | None = None
    """Granularity of the scales of linear layers in fp8; None if they are in bfloat16."""
    cache_bytes: float = _BYTES
    """Bytes of a value in the cache."""
    cache_delay: float = 1.0
    """Factor by which its bytes take longer to read than weights; see the function of this name."""
    in_process: bool = False
    """Transformers in the worker, batch after batch."""

    def step(self, running: float, context: float) -> float:
        """Return the seconds to decode a token of `running` responses with a mean of `context` tokens."""
        shape, gpus, device = self.shape, self.tensor * self.stages, self.device
        flops = _flops(shape)
        read = self._bytes_read(running) / gpus / device.decode_memory
        multiplied = running * (flops.per_token / self._gain + flops.per_prediction) / gpus / device.decode_matmul
        # Latent attention's cache is whole on every GPU, and so are key heads that are fewer than the GPUs.
        parts = 1 if shape.latent else min(self.tensor, shape.key_value_heads)
        values = running * context * shape.cache_values_per_token * shape.layers
        cached = values * self.cache_bytes / (parts * self.stages)
        drawn = running * shape.vocabulary * 4 * self.sampling_passes / device.decode_memory
        # If a product takes about as long as reading its weights, neither hides the other: 8B with 128 responses.
        seconds = math.hypot(read, multiplied) + self.cache_delay * cached / device.decode_memory
        seconds = self.stages * seconds + drawn  # A token passes all stages before the next begins.
        if self.tensor > 1:
            link = device.link(self.tensor, self.per_node)
            size = running * shape.hidden * _BYTES
            seconds += 2 * shape.layers * (_REDUCTION_S + 2 * size * (self.tensor - 1) / self.tensor / link)
        if self.in_process:
            return seconds + shape.layers * _HF_LAYER_S[device.is_gpu]
        if running > self.largest_graph:
            seconds += shape.layers * _WITHOUT_GRAPH_S
        return seconds + _STEP_S + running * self.response_s

    def prefill(self, tokens: float, length: float) -> float:
        """Return the seconds to prefill prompts of `length` tokens each, `tokens` in all."""
        flops = _flops(self.shape)
        operations = tokens * (flops.per_token / self._gain + flops.per_pair * length / 2)
        return operations / (self.tensor * self.stages) / (self.device.matmul * _PREFILL_SHARE)

    def predictions(self, tokens: float) -> float:
        """Return the seconds of the logits of `tokens` given tokens, and of their log-probs."""
        device, gpus = self.device, self.tensor * self.stages
        multiplied = tokens * _flops(self.shape).per_prediction / gpus / (device.matmul * _PREFILL_SHARE)
        return multiplied + tokens * self.shape.vocabulary * 4 * _SCORING_PASSES / self.tensor / device.memory

    @property
    def _gain(self) -> float:
        return self.device.fp8_speedup(by_block=self.fp8 == "block") if self.fp8 else 1.0

    def _bytes_read(self, running: float) -> float:
        """Return the bytes of weights that a step reads: in a mixture, of the experts that some token is sent to."""
        always, routed = _parameters(self.shape)
        head, weight = self.shape.embedding * _BYTES, 1 if self.fp8 else _BYTES
        layers = (always - self.shape.embedding) * weight
        if self.shape.experts is None:
            return head + layers
        share = self.shape.experts.chosen / self.shape.experts.count
        return head + layers + routed * weight * (1 - (1 - share) ** running)


_flops = lru_cache(maxsize=64)(model_flops)


@lru_cache(maxsize=64)
def _parameters(shape: ModelShape) -> tuple[int, int]:
    """Count the parameters of layers and head without routed experts and the embedding, and of routed experts."""
    layers = [shape.layer(index) for index in shape.positions]
    routed = sum(layer.experts for layer in layers)
    return sum(layer.total for layer in layers) - routed + shape.embedding, routed


@dataclass(frozen=True, slots=True)
class Generation:
    """The work of one server."""

    prompts: float
    per_prompt: int
    lengths: Lengths
    shards: int = 1
    """Shards of the step that its prompts are spread over, evenly."""
    enough: float = 1.0
    """Share of the prompts after which it stops: below 1 if it starts more than the step needs."""


@lru_cache(maxsize=4096)
def shard_ends(server: Server, work: Generation) -> tuple[float, ...]:
    """Return the ends of the shards, in seconds after the start, ascending; the last is the end of the generation."""
    responses = work.prompts * work.per_prompt
    bundles = max(1, min(max(_BUNDLES, work.shards), round(responses)))
    size = responses / bundles
    lengths = [work.lengths.quantile(_spread(index, bundles)) for index in range(bundles)]
    if work.lengths.varied:
        # The longest of many responses is near the limit, for any number of bundles.
        longest = max(range(bundles), key=lengths.__getitem__)
        lengths[longest] = work.lengths.quantile(1 - 0.5 / max(1.0, responses))
    prefix = work.lengths.prompt
    unique = work.prompts if server.shares_prompts else responses
    shared = server.shares_prompts and work.per_prompt > 1
    read = prefix * (_SHARED_PROMPT_SHARE if shared else 1.0)
    ends = _follow(server, lengths, size, prefix, read, prefill=server.prefill(unique * prefix, prefix))
    needed = sorted(ends)[: max(1, round(work.enough * bundles))][-1]
    shards = [0.0] * work.shards
    for index, end in enumerate(ends):
        shard = index * work.shards // bundles
        shards[shard] = max(shards[shard], min(end, needed))
    return tuple(sorted(end or needed for end in shards))


def _follow(
    server: Server, lengths: list[float], size: float, prompt: float, read: float, *, prefill: float
) -> list[float]:
    """Return the ends of bundles of `size` responses of these lengths; a step reads `read` tokens of a prompt.

    Bundles start in order, when the batch and the cache have room; prefill is spread over their starts.
    """
    mean = sum(lengths) / len(lengths)
    places = max(size, min(server.running, server.cache_tokens / (prompt + mean)))
    most = max(1, int(places / size + 1e-9))
    ends = [0.0] * len(lengths)
    running: list[tuple[float, int]] = []
    """Steps at which bundles end, and their indices."""
    waiting, now, step, begun_at = 0, 0.0, 0.0, 0.0
    if server.in_process:
        return _batch_after_batch(server, lengths, size, prompt, most, prefill=prefill)
    while running or waiting < len(lengths):
        while len(running) < most and waiting < len(lengths):
            heapq.heappush(running, (step + lengths[waiting], waiting))
            begun_at += step
            now += prefill / len(lengths)
            waiting += 1
        until, _ = running[0]
        count = len(running)
        context = read + (step + until) / 2 - begun_at / count
        now += (until - step) * server.step(count * size, context)
        step = until
        while running and running[0][0] <= step:
            _, index = heapq.heappop(running)
            begun_at -= step - lengths[index]
            ends[index] = now
    return ends


def _batch_after_batch(
    server: Server, lengths: list[float], size: float, prompt: float, most: int, *, prefill: float
) -> list[float]:
    ends: list[float] = []
    now = 0.0
    for first in range(0, len(lengths), most):
        batch = lengths[first : first + most]
        longest = max(batch)
        now += prefill * len(batch) / len(lengths)
        now += longest * server.step(len(batch) * size, prompt + longest / 2)
        ends += [now] * len(batch)
    return ends


def _spread(index: int, count: int) -> float:
    """Return the middle of one of `count` equal shares.

    Neighbours get distant shares (golden ratio), so that any run of bundles has short and long responses.
    """
    return ((index * 0.6180339887498949) % 1.0 * (count - 1) + 0.5) / count
