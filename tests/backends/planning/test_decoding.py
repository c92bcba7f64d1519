"""Seconds of generation, and the spread of lengths."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagrl.backends.families.registry import shape_of
from dagrl.backends.planning.decoding import Generation, Lengths, Server, cache_delay, shard_ends
from dagrl.backends.planning.device_rates import rates_of
from dagrl.backends.planning.gpus import gpu_named

H200 = rates_of(gpu_named("H200"))
DENSE = shape_of(
    {"model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36}
    | {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936}
)
MIXTURE = shape_of(
    {"model_type": "qwen3_moe", "hidden_size": 2048, "moe_intermediate_size": 768, "num_hidden_layers": 48}
    | {"num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936}
    | {"num_experts": 128, "num_experts_per_tok": 8, "intermediate_size": 6144}
)


@given(st.floats(0.05, 1.0), st.integers(16, 8192))
def test_the_spread_of_lengths_has_the_mean_that_is_asked_for(share: float, longest: int) -> None:
    lengths = Lengths(100, share * longest, longest)
    drawn = [lengths.quantile((index + 0.5) / 4000) for index in range(4000)]
    assert max(drawn) <= longest
    assert sum(drawn) / 4000 == pytest.approx(lengths.response, rel=0.02, abs=1)
    assert sum((100 + each) ** 2 for each in drawn) / 4000 == pytest.approx(lengths.mean_square, rel=0.03)


SERVER = Server(DENSE, H200, tensor=1, per_node=8, cache_tokens=1e6)
WORK = Generation(64, 8, Lengths(512, 1024, 2048), shards=4)


def test_shards_come_in_order_and_the_last_ends_the_run() -> None:
    ends = shard_ends(SERVER, WORK)
    assert len(ends) == 4 and list(ends) == sorted(ends) and ends[0] > 0
    assert shard_ends(SERVER, replace(WORK, shards=1))[-1] == pytest.approx(ends[-1], rel=1e-6)


@pytest.mark.parametrize(
    "server",
    [
        replace(SERVER, running=64),
        replace(SERVER, cache_tokens=64 * 1536),
        replace(SERVER, largest_graph=0),
        replace(SERVER, shares_prompts=False),
        replace(SERVER, tensor=8, per_node=4, device=replace(H200, network=1e8)),
        replace(SERVER, device=rates_of(gpu_named("A100-80GB"))),
    ],
)
def test_less_of_a_server_takes_longer(server: Server) -> None:
    assert shard_ends(server, WORK)[-1] > shard_ends(SERVER, WORK)[-1]


def test_more_gpus_and_less_work_take_less() -> None:
    whole = shard_ends(SERVER, WORK)[-1]
    assert shard_ends(replace(SERVER, tensor=4), WORK)[-1] < whole
    assert shard_ends(SERVER, replace(WORK, prompts=32))[-1] < whole
    assert shard_ends(SERVER, replace(WORK, lengths=Lengths(512, 512, 2048)))[-1] < whole
    assert shard_ends(SERVER, replace(WORK, enough=0.75))[-1] < whole, "the slowest are not waited for"


def test_a_single_response_waits_for_the_weights_that_it_reads() -> None:
    to_read = 2 * (DENSE.parameters - DENSE.embedding) / H200.decode_memory
    # What the host adds to a step is 1.1 ms.
    assert to_read < SERVER.step(1, 0) < to_read + 1.2e-3
    # A token passes all stages before the next begins.
    assert replace(SERVER, stages=2).step(64, 4096) == pytest.approx(SERVER.step(64, 4096))


def test_more_tokens_at_a_time_read_more_of_a_mixtures_experts() -> None:
    server = replace(SERVER, shape=MIXTURE)
    few, many = server.step(1, 0), server.step(64, 0)
    assert few < 2 * 2 * MIXTURE.active_parameters / H200.decode_memory
    assert many == pytest.approx(2 * MIXTURE.parameters / H200.decode_memory, rel=0.2)


def test_batch_after_batch_takes_its_prompts_in_and_then_waits_for_its_longest() -> None:
    server = Server(DENSE, H200, running=16, shares_prompts=False, in_process=True)
    ends = shard_ends(server, Generation(32, 2, Lengths(1000, 10, 10), shards=4))
    first = server.prefill(16 * 1000, 1000) + 10 * server.step(16, 1005)
    assert ends == pytest.approx([first, 2 * first, 3 * first, 4 * first])


def test_fp8_halves_what_layers_read_speeds_up_their_products_and_leaves_the_head() -> None:
    for shape in (DENSE, MIXTURE):
        plain = replace(SERVER, shape=shape, device=replace(H200, decode_matmul=1e30))
        seconds = plain.step(1e6, 1) - replace(plain, fp8="block").step(1e6, 1)
        # All experts are read, and norms count with the layers.
        assert seconds == pytest.approx(shape.matrices / H200.decode_memory, rel=0.01)
    slow = replace(SERVER, device=replace(H200, decode_memory=1e30))
    seconds = 512 * 2 * DENSE.matrices / H200.decode_matmul
    for scaled, speedup in (("block", 1.34), ("channel", 1.56)):
        saved = slow.step(512, 1) - replace(slow, fp8=scaled).step(512, 1)
        assert saved == pytest.approx(seconds * (1 - 1 / speedup), rel=0.01)
    assert replace(SERVER, fp8="block", device=rates_of(gpu_named("A100-80GB")))._gain == 1.0


@pytest.mark.parametrize(("page", "share"), [(1, 0.975), (16, 0.975), (64, 0.8)])
def test_a_cache_in_fp8_is_read_faster_where_its_pages_are_large(page: int, share: float) -> None:
    plain, small = (replace(SERVER, cache_bytes=each, cache_delay=cache_delay(each, page)) for each in (2, 1))
    read = 64 * 10_000 * DENSE.cache_values_per_token * DENSE.layers * 2 / H200.decode_memory
    assert plain.step(64, 10_000) - small.step(64, 10_000) == pytest.approx((1 - share) * read)
