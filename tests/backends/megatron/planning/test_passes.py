"""Seconds of passes and optimizer steps: what follows from definitions, and the direction of each option."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dagrl.backends.families.registry import shape_of
from dagrl.backends.families.shape import ModelShape
from dagrl.backends.megatron.planning.layers import Pack
from dagrl.backends.megatron.planning.passes import Passes, recompute_of
from dagrl.backends.megatron.section import MegatronEngineSpec, ParallelSpec
from dagrl.backends.planning.costs import PlannedBatch
from dagrl.backends.planning.decoding import Lengths
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
BATCH = PlannedBatch(512, Lengths(512, 1536, 1536), 16384)


def engine(fields: dict[str, Any] | None = None, **sizes: Any) -> MegatronEngineSpec:
    parallel = ParallelSpec(**sizes, sequence_parallel=sizes.get("tensor_model_parallel_size", 1) > 1)
    return MegatronEngineSpec(backend="megatron", group="gpu", parallel=parallel, **(fields or {}))


def passes(spec: MegatronEngineSpec, shape: ModelShape = DENSE, ranks: int = 8) -> Passes:
    return Passes(shape, spec, ranks, 8, H200)


def optimizer_seconds(spec: MegatronEngineSpec, ranks: int = 8, per_node: int = 8) -> float:
    return Passes(DENSE, spec, ranks, per_node, H200).optimizer_step()


def test_micro_batches_fill_the_budget_and_rounds_of_chunks() -> None:
    # 512 rows of 2048 tokens on 4 replicas: 128 rows, 8 to a micro-batch.
    assert passes(engine(tensor_model_parallel_size=2)).micro_batches(BATCH)[0] == 16
    chunked = engine(pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=3)
    odd = replace(BATCH, rows=4 * 8 * 3)
    assert passes(chunked).micro_batches(odd)[0] == 4, "three micro-batches are not a whole round of two stages"
    count, pack = passes(engine(tensor_model_parallel_size=2)).micro_batches(BATCH)
    assert count * pack.tokens * 4 == 512 * 2048
    assert count * pack.predictions * 4 == 512 * 1536
    # Fewer rows than replicas: some have one, and the others wait for them.
    assert passes(engine()).micro_batches(replace(BATCH, rows=1)) == (1, Pack(2048, BATCH.lengths.mean_square, 1536))


def test_logits_in_chunks_are_computed_again_only_for_losses_of_whole_responses() -> None:
    summed, fused = replace(BATCH, sums_over_tokens=True), engine({"fused_linear_cross_entropy": True})
    assert passes(fused).train(summed) == passes(engine()).train(summed) == passes(engine()).train(BATCH)
    again = passes(fused).train(BATCH) - passes(fused).train(summed)
    # Of 8 replicas each predicts 64 x 1536 tokens, by a product of 4096 x 151936, and passes over the logits besides.
    product = 2 * 64 * 1536 * 4096 * 151936 / H200.matmul
    assert product < again < 1.5 * product
    assert passes(fused).forward(BATCH) == passes(engine()).forward(BATCH)


def test_rows_of_a_prompt_share_it() -> None:
    batch = PlannedBatch(64, Lengths(4096, 512, 512), 16384, per_prompt=8)
    count, pack = passes(engine({"prefix_sharing": True})).micro_batches(batch)
    assert count * pack.tokens * 8 == 64 * (512 + 4096 / 8)
    # A prompt attends to itself once, and each response to it.
    assert pack.squares * count * 8 == 64 * (4096**2 / 8 + 2 * 4096 * 512 + 512**2)
    alone = replace(batch, per_prompt=1)
    assert passes(engine({"prefix_sharing": True})).micro_batches(alone) == passes(engine()).micro_batches(batch)
    few = replace(batch, budget=4096 + 2 * 512)
    count, pack = passes(engine({"prefix_sharing": True})).micro_batches(few)
    assert count * pack.tokens * 8 == 64 * (512 + 4096 / 2), "two responses to a micro-batch"


def test_a_pipeline_costs_its_filling_once() -> None:
    found = passes(engine(pipeline_model_parallel_size=4))
    once, twice, thrice = (found.train(replace(BATCH, rows=512 * times)) for times in (1, 2, 3))
    assert thrice - twice == pytest.approx(twice - once), "each further micro-batch costs the slowest stage"
    assert 2 * once > twice
    chunks = passes(engine(pipeline_model_parallel_size=4, virtual_pipeline_model_parallel_size=3))
    assert chunks.train(BATCH) < found.train(BATCH)
    assert chunks.forward(BATCH) < found.forward(BATCH)
    # But each chunk sends what it has on.
    slow = {"per_node": 1, "device": replace(H200, network=1e7)}
    assert replace(chunks, **slow).forward(BATCH) > 2 * replace(found, **slow).forward(BATCH)
    alone = replace(BATCH, rows=1)
    # A single micro-batch is on one stage at a time.
    assert found.forward(alone) == pytest.approx(passes(engine(), ranks=1).forward(alone), rel=0.05)


def test_recomputation_adds_a_forward_pass_and_less_of_it_less() -> None:
    full = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    half = full | {"recompute_method": "block", "recompute_num_layers": 18}
    selective = {"recompute_granularity": "selective"}
    none, some, part, whole = (
        passes(engine({"transformer": fields}), ranks=1).train(replace(BATCH, rows=64))
        for fields in ({}, selective, half, full)
    )
    assert none < some < part < whole
    # The output layer is not done again.
    forward = passes(engine(), ranks=1).forward(replace(BATCH, rows=64))
    assert 0.7 * forward < whole - none < forward
    assert part - none == pytest.approx((whole - none) / 2)
    # Megatron counts the layers of a stage's chunk.
    for sizes, layers in ((1, None), 18), ((2, None), 9), ((2, 3), 3):
        stages, chunks = sizes
        split = {"pipeline_model_parallel_size": stages, "virtual_pipeline_model_parallel_size": chunks}
        assert (
            recompute_of(engine({"transformer": half | {"recompute_num_layers": layers}}, **split), DENSE).whole == 0.5
        )


@pytest.mark.parametrize(
    ("shape", "sizes"),
    [
        (DENSE, {"tensor_model_parallel_size": 8}),
        (DENSE, {"context_parallel_size": 4}),
        (DENSE, {"pipeline_model_parallel_size": 4}),
        (MIXTURE, {"expert_model_parallel_size": 8}),
    ],
)
def test_transfers_between_machines_are_slower(shape: ModelShape, sizes: dict[str, int]) -> None:
    inside = Passes(shape, engine(**sizes), 8, 8, H200)
    assert replace(inside, per_node=2).train(BATCH) > inside.train(BATCH)


def test_a_mixture_costs_by_the_experts_that_are_chosen() -> None:
    assert MIXTURE.experts is not None
    more = replace(MIXTURE, experts=replace(MIXTURE.experts, chosen=16))
    # With fewer tokens a micro-batch the host is waited for, which handles all experts in any case.
    large = replace(BATCH, budget=2**18)
    assert passes(engine(), more).forward(large) > 1.2 * passes(engine(), MIXTURE).forward(large)


def test_ranks_that_split_the_sequence_read_and_write_less_of_it() -> None:
    large = replace(BATCH, budget=2**18)
    split = engine(tensor_model_parallel_size=2)
    whole = split.model_copy(update={"parallel": split.parallel.model_copy(update={"sequence_parallel": False})})
    assert passes(split).forward(large) < passes(whole).forward(large)


def test_little_work_waits_for_the_host() -> None:
    short = replace(BATCH, rows=1, lengths=Lengths(8, 8, 8))
    # 36 layers are launched, whatever is in the micro-batch.
    assert passes(engine(), ranks=1).forward(short) > 36 * 0.5e-3


def test_overlapping_and_more_replicas_save_time_and_offloading_costs_it() -> None:
    plain = optimizer_seconds(engine())
    assert optimizer_seconds(engine({"ddp": {"overlap_grad_reduce": True}})) < plain
    assert optimizer_seconds(engine({"offload": {"optimizer": True}})) > plain
    assert optimizer_seconds(engine({"optimizer": {"optimizer_cpu_offload": True}})) > plain
    assert optimizer_seconds(engine(), per_node=2) > plain
    assert optimizer_seconds(engine({"ddp": {"overlap_param_gather": True}})) < plain
    assert optimizer_seconds(engine({"optimizer": FEW_BITS})) < plain
    assert optimizer_seconds(engine({"optimizer": {"use_distributed_optimizer": False}})) > plain
    assert optimizer_seconds(engine(), ranks=1) < plain, "a single replica has nobody to tell"


FEW_BITS = {"use_precision_aware_optimizer": True, "exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"}


@pytest.mark.parametrize(
    ("fields", "each"),
    [
        ({}, 12 / 8),
        ({"use_distributed_optimizer": False}, 12),
        # Moments of two bytes, and the two that the weight lacks of its float32 one.
        (FEW_BITS, 6 / 8),
        ({"optimizer_cpu_offload": True}, 0),
        ({"optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.75}, 3 / 8),
    ],
)
def test_states_on_a_gpu_are_its_share_of_them_and_leave_it_at_the_links_rates(fields, each) -> None:
    spec, offloaded = (engine({"optimizer": fields, "offload": {"optimizer": away}}) for away in (False, True))
    nbytes = passes(spec).states.on_device
    assert nbytes == pytest.approx(each * DENSE.parameters, rel=1e-3)
    moved = optimizer_seconds(offloaded) - optimizer_seconds(spec)
    assert moved == pytest.approx(nbytes / H200.to_host + nbytes / H200.from_host)


def test_fp8_speeds_up_layers_where_the_gpu_has_it() -> None:
    big = replace(BATCH, budget=65536)
    plain, fp8 = engine(), engine({"transformer": {"fp8": "hybrid"}})
    assert passes(plain).train(big) > passes(fp8).train(big) > passes(plain).train(big) / 2
    ampere = rates_of(gpu_named("A100-80GB"))
    seconds = [Passes(DENSE, spec, 8, 8, ampere).train(big) for spec in (plain, fp8)]
    assert seconds[0] < seconds[1], "inputs are rounded for nothing"
    launched, launched_in_fp8 = (passes(spec, MIXTURE).train(big) for spec in (plain, fp8))
    assert launched < launched_in_fp8 < 1.02 * launched, "the host launches experts' kernels"
