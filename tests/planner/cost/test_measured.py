"""Estimates against everything of benchmarks/RESULTS.md that was measured on GPUs: within 20 %."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from dagrl.backends.families.registry import shape_of
from dagrl.backends.families.shape import ModelShape
from dagrl.backends.megatron.planning.costs import trainer_down_seconds, trainer_sleep_seconds, trainer_wake_seconds
from dagrl.backends.megatron.planning.passes import Passes
from dagrl.backends.megatron.planning.stages import STATE_BYTES
from dagrl.backends.megatron.section import MegatronEngineSpec, ParallelSpec
from dagrl.backends.planning.costs import PlannedBatch, server_sleep_seconds, server_wake_seconds
from dagrl.backends.planning.decoding import Generation, Lengths, Server, cache_delay, shard_ends
from dagrl.backends.planning.device_rates import rates_of
from dagrl.backends.planning.gpus import gpu_named
from dagrl.backends.sglang.costs import OWN_PASSES
from dagrl.backends.vllm.costs import LOGPROB_S, SAMPLING_PASSES, TOKEN_S
from dagrl.planner.cost.costs import PipelineCosts, sync_seconds
from dagrl.planner.cost.estimate import estimate_step
from dagrl.planner.cost.lengths import Assumed
from dagrl.planner.showing.report import report

H200 = rates_of(gpu_named("H200"))
QWEN3 = {"model_type": "qwen3", "head_dim": 128, "vocab_size": 151936, "num_key_value_heads": 8}
BILLIONS_1_7 = shape_of(
    QWEN3
    | {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16}
    | {"tie_word_embeddings": True}
)
BILLIONS_8 = shape_of(
    QWEN3
    | {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32}
    | {"tie_word_embeddings": False}
)
TWELVE_LAYERS = replace(BILLIONS_8, layers=12)
SIX_LAYERS = shape_of(
    {"model_type": "qwen3_moe", "head_dim": 128, "vocab_size": 151936, "num_key_value_heads": 4, "num_experts": 128}
    | {"hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts_per_tok": 8}
    | {"num_hidden_layers": 6, "num_attention_heads": 32, "tie_word_embeddings": False}
)


def trainer(shape: ModelShape, tensor: int, experts: int = 1) -> Passes:
    parallel = ParallelSpec(
        tensor_model_parallel_size=tensor, sequence_parallel=tensor > 1, expert_model_parallel_size=experts
    )
    spec = MegatronEngineSpec(backend="megatron", group="gpu", parallel=parallel)
    ranks = max(tensor, experts)
    return Passes(shape, spec, ranks, ranks, H200)


def log_probs(shape: ModelShape, tensor: int, micro_batches: int, tokens: int, experts: int = 1) -> float:
    """As ``benchmarks/train_step.py``: rows of 2048 tokens, all but the first of them the response."""
    passes = trainer(shape, tensor, experts)
    return passes.forward(rows(passes, micro_batches, tokens))


def train_step(shape: ModelShape, tensor: int, micro_batches: int, tokens: int, experts: int = 1) -> float:
    passes = trainer(shape, tensor, experts)
    return passes.train(rows(passes, micro_batches, tokens)) + passes.optimizer_step()


def shared(n: int, groups: int, lengths: Lengths, budget: int, *, trains: int = 0) -> float:
    """Log-probs of 1.7B with `prefix_sharing`, or an update of so many optimizer steps."""
    spec = MegatronEngineSpec(backend="megatron", group="gpu", prefix_sharing=True)
    passes = Passes(BILLIONS_1_7, spec, 1, 1, H200)
    batch = PlannedBatch(n * groups / max(1, trains), lengths, budget, per_prompt=n)
    return trains * (passes.train(batch) + passes.optimizer_step()) if trains else passes.forward(batch)


def in_fp8(shape: ModelShape, tensor: int, ranks: int, *, shares: bool = False) -> Passes:
    """Scales of tensors."""
    spec = MegatronEngineSpec(
        backend="megatron",
        group="gpu",
        parallel=ParallelSpec(tensor_model_parallel_size=tensor, sequence_parallel=tensor > 1),
        transformer={"fp8": "hybrid", "fp8_recipe": "tensorwise"},
        prefix_sharing=shares,
    )
    return Passes(shape, spec, ranks, ranks, H200)


def log_probs_in_fp8(shape: ModelShape, tensor: int, rows: int, prompt: int, **layout: Any) -> float:
    passes = in_fp8(shape, tensor, **layout)
    return passes.forward(PlannedBatch(rows, Lengths(prompt, 768 - prompt, 768 - prompt), 12288, per_prompt=4))


def updates_in_fp8(
    shape: ModelShape, tensor: int, rows: int, prompt: int, *, budget: int = 12288, steps: int = 1, **layout: Any
) -> float:
    """So many optimizer steps, each on so many rows."""
    passes = in_fp8(shape, tensor, **layout)
    batch = PlannedBatch(rows, Lengths(prompt, 768 - prompt, 768 - prompt), budget, per_prompt=4)
    return steps * (passes.train(batch) + passes.optimizer_step())


def rollout_in_fp8() -> float:
    """Scales of blocks, and a cache in pages of one token."""
    cache = {"cache_bytes": 1, "cache_delay": cache_delay(1, 1)}
    return rollout(BILLIONS_8, 1, 128, 4, Lengths(256, 512, 512), sampling_passes=OWN_PASSES, fp8="block", **cache)


def rows(passes: Passes, micro_batches: int, tokens: int) -> PlannedBatch:
    """So many micro-batches of each replica."""
    return PlannedBatch(passes.replicas * micro_batches * tokens / 2048, Lengths(1, 2047, 2047), tokens)


def rollout(shape: ModelShape, tensor: int, prompts: int, n: int, lengths: Lengths, **costs: Any) -> float:
    server = Server(shape, H200, tensor=tensor, per_node=4, cache_tokens=1e6, **costs)
    return shard_ends(server, Generation(prompts, n, lengths))[-1]


def rollout_on_vllm(*, logprobs: bool = True) -> float:
    seconds = TOKEN_S if logprobs else TOKEN_S - LOGPROB_S
    costs = {"response_s": seconds, "sampling_passes": SAMPLING_PASSES}
    return rollout(BILLIONS_1_7, 1, 512, 1, Lengths(256, 512, 512), **costs)


def rollout_on_sglang(shape: ModelShape, tensor: int, prompts: int, n: int, lengths: Lengths) -> float:
    """With dagrl's sampler, as today."""
    return rollout(shape, tensor, prompts, n, lengths, sampling_passes=OWN_PASSES)


@pytest.mark.parametrize(
    ("estimate", "measured"),
    [
        # "The train step", 2026-11-21.
        pytest.param(lambda: log_probs(BILLIONS_1_7, 1, 4, 16384), 0.463, id="log-probs of 1.7B"),
        pytest.param(lambda: train_step(BILLIONS_1_7, 1, 4, 16384), 1.449, id="train step of 1.7B"),
        pytest.param(lambda: log_probs(BILLIONS_8, 2, 4, 16384), 1.037, id="log-probs of 8B, TP2"),
        pytest.param(lambda: train_step(BILLIONS_8, 2, 4, 16384), 3.149, id="train step of 8B, TP2"),
        # Bare, another day: 48.5k tokens/s with 32k tokens in a micro-batch, two of them.
        pytest.param(lambda: train_step(BILLIONS_1_7, 1, 2, 32768), 65536 / 48500, id="train step of 1.7B, 32k tokens"),
        # A mixture, 2026-11-22.
        pytest.param(
            lambda: log_probs(SIX_LAYERS, 1, 4, 16384, 2), 0.742, id="log-probs of six layers of 30B-A3B, EP2"
        ),
        pytest.param(
            lambda: train_step(SIX_LAYERS, 1, 4, 16384, 2), 1.978, id="train step of six layers of 30B-A3B, EP2"
        ),
        # Shared prompts, 2026-11-26: "dagrl and verl 0.9.1" of RESULTS.md, and prefix_sharing.py on an H200.
        pytest.param(lambda: shared(4, 128, Lengths(256, 512, 512), 12288), 2.07, id="log-probs, shared"),
        pytest.param(lambda: shared(4, 128, Lengths(256, 512, 512), 12288, trains=2), 6.27, id="update, shared"),
        pytest.param(lambda: shared(8, 8, Lengths(4096, 512, 512), 18432), 0.559, id="log-probs, long prompts"),
        pytest.param(lambda: shared(8, 8, Lengths(4096, 512, 512), 18432, trains=1), 1.858, id="update, long prompts"),
        # In fp8, 2026-11-26: "SGLang".
        *(
            pytest.param(partial(log_probs_in_fp8, *load, **layout), measured, id=f"log-probs in fp8, {name}")
            for name, load, layout, measured in (
                ("8B, TP2", (BILLIONS_8, 2, 512, 256), {"ranks": 2}, 6.02),
                ("whole 8B on each", (BILLIONS_8, 1, 512, 256), {"ranks": 2, "shares": True}, 2.91),
                ("12 layers", (TWELVE_LAYERS, 1, 64, 1), {"ranks": 1}, 0.358),
                ("12 layers, TP2", (TWELVE_LAYERS, 2, 64, 1), {"ranks": 2}, 0.279),
            )
        ),
        *(
            pytest.param(partial(updates_in_fp8, *load, **layout), measured, id=f"update in fp8, {name}")
            for name, load, layout, measured in (
                ("8B, TP2", (BILLIONS_8, 2, 256, 256), {"ranks": 2, "steps": 2}, 13.41),
                (
                    "whole 8B on each",
                    (BILLIONS_8, 1, 256, 256),
                    {"ranks": 2, "shares": True, "budget": 6144, "steps": 2},
                    11.0,
                ),
                ("12 layers", (TWELVE_LAYERS, 1, 64, 1), {"ranks": 1}, 1.203),
                ("12 layers, TP2", (TWELVE_LAYERS, 2, 64, 1), {"ranks": 2}, 0.712),
            )
        ),
        pytest.param(lambda: rollout_in_fp8(), 12.73, id="rollout of 8B in fp8"),
        # "SGLang": the node of a pipeline on one GPU, and a whole server's share of four GPUs.
        pytest.param(lambda: rollout(BILLIONS_1_7, 1, 512, 1, Lengths(256, 512, 512)), 9.30, id="rollout of 1.7B"),
        pytest.param(lambda: rollout(BILLIONS_8, 2, 8, 8, Lengths(1024, 2048, 2048)), 13.7, id="rollout of 8B, TP2"),
        # 2026-11-22: several responses to each prompt, and 128 to 512 at a time.
        pytest.param(lambda: rollout(BILLIONS_1_7, 1, 64, 8, Lengths(1024, 512, 512)), 12.3, id="1.7B, 8 to a prompt"),
        pytest.param(lambda: rollout(BILLIONS_1_7, 1, 128, 4, Lengths(256, 512, 512)), 7.53, id="1.7B, 4 to a prompt"),
        pytest.param(lambda: rollout(BILLIONS_1_7, 1, 64, 4, Lengths(256, 512, 512)), 4.2, id="1.7B, 256 at a time"),
        pytest.param(lambda: rollout(BILLIONS_1_7, 1, 32, 4, Lengths(256, 768, 768)), 4.25, id="1.7B, 128 at a time"),
        pytest.param(lambda: rollout(BILLIONS_1_7, 2, 64, 4, Lengths(256, 768, 768)), 5.27, id="1.7B, TP2"),
        pytest.param(lambda: rollout(BILLIONS_8, 1, 32, 4, Lengths(256, 768, 768)), 7.87, id="8B, 128 at a time"),
        # With dagrl's sampler, 2026-11-26; those above had SGLang's.
        *(
            pytest.param(partial(rollout_on_sglang, *load), measured, id=name)
            for name, load, measured in (
                ("1.7B, own sampler", (BILLIONS_1_7, 1, 128, 4, Lengths(256, 512, 512)), 6.72),
                ("8B, TP2, own sampler", (BILLIONS_8, 2, 128, 4, Lengths(256, 512, 512)), 8.77),
                ("1.7B, 32 of 8192 tokens", (BILLIONS_1_7, 1, 8, 4, Lengths(256, 8192, 8192)), 48.6),
                ("1.7B, 16 of 16384 tokens", (BILLIONS_1_7, 1, 4, 4, Lengths(256, 16384, 16384)), 92.4),
            )
        ),
        # vLLM, 2026-11-24: the node of a pipeline, and bare.
        pytest.param(lambda: rollout_on_vllm(), 9.64, id="1.7B on vLLM"),
        pytest.param(lambda: rollout_on_vllm(), 10.04, id="1.7B on vLLM, bare"),
        pytest.param(lambda: rollout_on_vllm(logprobs=False), 8.12, id="1.7B on vLLM, bare, without log-probs"),
    ],
)
def test_work(estimate: Any, measured: float) -> None:
    assert estimate() == pytest.approx(measured, rel=0.2)


@pytest.mark.parametrize(
    ("shape", "way", "measured"),
    [
        (BILLIONS_1_7, "cuda_ipc", 34.2e-3),
        (BILLIONS_1_7, "broadcast", 33.2e-3),
        (BILLIONS_8, "broadcast", 72.5e-3),
    ],
)
def test_weight_syncs(shape: ModelShape, way: Any, measured: float) -> None:
    """From the end of the update to servers that are ready."""
    seconds = sync_seconds(way, 2 * shape.parameters, H200, link=H200.peers, gathered=0.0, owned=1.0, neighbours=1)
    assert seconds == pytest.approx(measured, rel=0.2)


def test_a_step_of_8b() -> None:
    """The last step of "Sleep and offload"'s run of 8B on four GPUs, trainer TP2 x PP2, servers TP2, which take turns.

    Its weights are random, so that nearly all responses are cut at 2048 tokens; prompts were made of all of their 1024.
    """
    template = Path(__file__).parents[3] / "dag_templates" / "qwen3_8b_megatron.yaml"
    overrides = [
        "groups.gpu.gpus_per_node=4",
        "engines.actor.parallel.pipeline_model_parallel_size=2",
        "data.prompts_per_step=16",
        # As it was then.
        "engines.actor.keep_communicators=false",
    ]
    found = report(template, overrides, gpu="H200")
    costs = PipelineCosts(found.pipeline, found.fit.plan, found.fit.shape, found.gpu, Assumed(1024, 2048))
    estimate = estimate_step(costs)
    told = {"step": estimate.step_s, **estimate.node_s}
    measured = {"step": 32.7, "rollout": 13.4, "update": 10.4, "ref": 4.8}
    assert {name: told[name] for name in measured} == pytest.approx(measured, rel=0.2)


def test_a_step_of_a_mixture() -> None:
    """The last step of 30B-A3B on four GPUs, trainer TP2 and EP4, one server; its updates still became faster."""
    template = Path(__file__).parents[3] / "dag_templates" / "qwen3_30b_a3b_8gpu.yaml"
    overrides = [
        *("groups.gpu.gpus_per_node=4", "data.prompts_per_step=16", "engines.generator.server.mem_fraction_static=0.2"),
        *("engines.actor.parallel.expert_model_parallel_size=4", "engines.actor.offload.grad=true"),
        "engines.actor.optimizer.use_precision_aware_optimizer=true",
        *("engines.actor.optimizer.exp_avg_dtype=bf16", "engines.actor.optimizer.exp_avg_sq_dtype=bf16"),
    ]
    found = report(template, overrides, gpu="H200")
    costs = PipelineCosts(found.pipeline, found.fit.plan, found.fit.shape, found.gpu, Assumed(1024, 2048))
    estimate = estimate_step(costs)
    told = {"step": estimate.step_s, **estimate.node_s}
    measured = {"step": 47.5, "rollout": 18.9, "update": 27.8}
    assert {name: told[name] for name in measured} == pytest.approx(measured, rel=0.2)


PARAMETERS = 1.72e9
"""The model of benchmarks/plan_accuracy.py, in bfloat16, with float32 weights and moments."""


@pytest.mark.parametrize("down", [0.45, 0.52])
def test_a_trainer_takes_turns_on_a_gpu(down: float) -> None:
    """In the steps after the second: the first two take the host's memory. `down`: two runs of a day."""
    weights, state = PARAMETERS * 2, PARAMETERS * STATE_BYTES
    # Before a sync all but the weights goes, after it the rest.
    assert trainer_down_seconds(state, H200, ranks=1) == pytest.approx(down, rel=0.2)
    assert trainer_sleep_seconds(weights, H200, closing=1) == pytest.approx(0.076, rel=0.2)
    assert trainer_wake_seconds(weights + state, H200, closed=1) == pytest.approx(0.488, rel=0.2)


def test_two_replicas_go_down_to_their_weights() -> None:
    """Each with half of the optimizer: means of the measured steps of three runs, the slower rank."""
    for measured in (0.347, 0.391, 0.353):
        down = trainer_down_seconds(PARAMETERS * STATE_BYTES / 2, H200, ranks=2)
        assert down == pytest.approx(measured, rel=0.2)


def test_a_server_takes_turns_on_a_gpu() -> None:
    """Its room for weights comes back before that of its cache, in two moves."""
    assert server_sleep_seconds(0.0, H200, ranks=1) == pytest.approx(0.047, rel=0.2)
    assert server_wake_seconds(PARAMETERS * 2, 0.0, H200) == pytest.approx(0.06, rel=0.2)
    assert server_wake_seconds(0.0, 0.0, H200) == pytest.approx(0.021, rel=0.2)
    # 8B, all of it on one GPU.
    assert server_wake_seconds(2 * BILLIONS_8.parameters, 0.0, H200) == pytest.approx(0.13, rel=0.2)


def test_ranks_close_their_communicators_when_they_sleep() -> None:
    """The arithmetic task with TP2, whose weights are next to nothing; 1.7B, replicas with their weights. All that was
    measured was of engines that do."""
    assert trainer_sleep_seconds(0.0, H200, closing=2) == pytest.approx(0.40, rel=0.2)
    assert trainer_sleep_seconds(PARAMETERS * 2, H200, closing=2) == pytest.approx(0.53, rel=0.2)
