"""Memory of trainers: against what was measured on GPUs, and rules that hold for any layout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from published_shapes import DEEPSEEK_V3, QWEN3_1B7, QWEN3_8B, QWEN3_30B, SIXTEEN_LAYERS

from dagrl.backends.families.registry import shape_of
from dagrl.backends.families.shape import ModelShape
from dagrl.backends.megatron.planning.activations import stage_activations
from dagrl.backends.megatron.planning.memory import trainer_memory
from dagrl.backends.megatron.planning.stages import rank_parameters, stages_of
from dagrl.backends.megatron.section import MegatronEngineSpec, padded_vocab_size
from dagrl.backends.planning.memory import GIB, EngineMemory
from dagrl.backends.planning.planned_engine import Workload

SPLIT = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
EVERYTHING = {"param": True, "grad": True, "optimizer": True}


def engine(parallel: dict[str, Any] | None = None, **sections: Any) -> MegatronEngineSpec:
    return MegatronEngineSpec.model_validate(
        {"backend": "megatron", "group": "gpu", "parallel": parallel or {}, **sections}
    )


def in_tensors(memory: EngineMemory) -> float:
    """GiB that torch counts: without what its allocator cannot use, and without context, kernels and NCCL."""
    return sum(nbytes for kind, nbytes in memory.awake.items() if kind not in ("allocator", "runtime")) / GIB


@dataclass(frozen=True)
class Measured:
    """A peak of torch's allocator on an H200; `benchmarks/RESULTS.md` says how each was taken."""

    gib: float
    shape: ModelShape
    engine: MegatronEngineSpec
    ranks: int
    work: Workload
    off: float
    """The estimate over the measurement, less 1."""


MEASURED = {
    "1.7B, 16384 tokens": Measured(69.1, QWEN3_1B7, engine(), 1, Workload(16384), -0.002),
    "1.7B, 32768 tokens": Measured(109, QWEN3_1B7, engine(), 1, Workload(32768), 0.000),
    "8B, TP2 + sequence parallel, 16384 tokens": Measured(111.3, QWEN3_8B, engine(SPLIT), 2, Workload(16384), 0.000),
}


@pytest.mark.parametrize("case", MEASURED.values(), ids=MEASURED)
def test_the_peak_of_an_update_is_the_one_that_was_measured(case: Measured) -> None:
    estimate = in_tensors(trainer_memory(case.shape, case.engine, case.ranks, case.work))
    assert estimate / case.gib - 1 == pytest.approx(case.off, abs=0.002)


def test_the_peak_of_a_pipelines_first_update_is_the_one_that_was_measured() -> None:
    # 8B on four GPUs, TP2 x PP2: five rows of 3072 tokens go into a micro-batch of 16384. The peak is of the first step
    # of a run, before whose end Adam has no moments: 8 of the 12 bytes of a parameter's optimizer.
    memory = trainer_memory(QWEN3_8B, engine({**SPLIT, "pipeline_model_parallel_size": 2}), 4, Workload(5 * 3072))
    assert memory.moment == "update, stage 1 of 2"
    moments = memory.awake["optimizer"] * 8 / 12 / GIB
    assert in_tensors(memory) - moments == pytest.approx(55, rel=0.02)


def test_the_peak_of_its_later_updates_is_the_one_that_was_measured() -> None:
    # The same run from its second update on, with Adam's moments: the micro-batches are of five whole rows still.
    memory = trainer_memory(QWEN3_8B, engine({**SPLIT, "pipeline_model_parallel_size": 2}), 4, Workload(5 * 3072))
    assert in_tensors(memory) == pytest.approx(70.3, rel=0.02)


def test_a_mixture_on_256_gpus_takes_what_can_be_worked_out_by_hand() -> None:
    """Qwen3-235B-A22B, TP4 x PP2 x EP16, so that a stage is 128 ranks: 32 of them hold the same attention, 8 the same
    experts.

    Parameters of a rank of the first stage, 47 of 94 layers:

    - experts: 128 / 16 = 8 of 3 matrices of 4096 x 1536: 8 * 3 * 4096 * 1536 = 150,994,944 a layer; 7,096,762,368
    - attention: queries and output 2 * 4096 * 64 * 128, keys and values 2 * 4096 * 4 * 128, over 4 ranks: 17,825,792 a
      layer; 837,812,224
    - whole on each rank: router 128 * 4096, norms 2 * 4096 + 2 * 128: 532,736 a layer; 25,038,592
    - embedding: 151,936 rows, filled up to 152,576 (a multiple of 1024 that four share) / 4 * 4096: 156,237,824

    The two that are not experts' make 1,019,088,640 parameters, whose states 32 ranks share; those of experts 8 share.
    """
    layers = {"hidden_size": 4096, "intermediate_size": 12288, "moe_intermediate_size": 1536, "num_hidden_layers": 94}
    shape = shape_of(
        {"model_type": "qwen3_moe", "vocab_size": 151936, "num_experts": 128, "num_experts_per_tok": 8, "head_dim": 128}
        | layers
        | {"num_attention_heads": 64, "num_key_value_heads": 4, "tie_word_embeddings": False}
    )
    assert shape.parameters == pytest.approx(235.1e9, rel=0.001)
    parallel = {
        "tensor_model_parallel_size": 4,
        "sequence_parallel": True,
        "pipeline_model_parallel_size": 2,
        "expert_model_parallel_size": 16,
    }
    memory = trainer_memory(shape, engine(parallel, transformer=FULL), 256, Workload(16384))
    experts, others = 7_096_762_368, 837_812_224 + 25_038_592 + 156_237_824
    assert memory.moment == "update, stage 1 of 2"
    assert memory.awake["weights"] == 2 * (experts + others)
    assert memory.awake["gradients"] == 4 * (experts + others)
    assert memory.awake["optimizer"] == pytest.approx(12 * (experts / 8 + others / 32), rel=1e-6)


@pytest.mark.parametrize(
    ("shape", "parallel", "ranks", "gib"), [(QWEN3_1B7, {}, 1, 33.8), (QWEN3_8B, SPLIT, 2, 71.3)], ids=["1.7B", "8B"]
)
def test_a_pass_of_log_probs_adds_what_was_measured(shape: ModelShape, parallel: Any, ranks: int, gib: float) -> None:
    # The engine that was measured trains too: what it holds between tasks is that of an update, without its pass.
    rests = trainer_memory(shape, engine(parallel), ranks, Workload(16384))
    passing = trainer_memory(shape, engine(parallel), ranks, Workload(0, logprob_tokens=16384))
    states = sum(rests.awake[kind] for kind in ("weights", "gradients", "optimizer")) / GIB
    assert passing.moment == "log-probs"
    estimate = states + (passing.awake["activations"] + passing.awake["logits"]) / GIB
    assert estimate == pytest.approx(gib, rel=0.01)


HELD = {
    "Adam": (17.96, {}),
    "on the host": (7.45, {"optimizer_cpu_offload": True}),
    "half on the host": (14.86, {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.5}),
}
"""GiB by the driver's count, after log-probs whose blocks the allocator keeps, and the ``optimizer:`` section."""


def states_of(optimizer: dict[str, Any]) -> float:
    memory = trainer_memory(SIXTEEN_LAYERS, engine(optimizer=optimizer), 1, Workload(2048))
    return sum(memory.awake[kind] for kind in ("weights", "gradients", "optimizer")) / GIB


@pytest.mark.parametrize("name", ["on the host", "half on the host"])
def test_an_optimizer_on_the_host_leaves_what_was_measured(name: str) -> None:
    # Kernels and what passes leave behind are in both figures.
    plain, (held, optimizer) = HELD["Adam"][0], HELD[name]
    assert states_of(optimizer) + plain - states_of({}) == pytest.approx(held, rel=0.03)


def test_a_precise_optimizer_saves_what_was_measured() -> None:
    saved = states_of({}) - states_of({"use_precision_aware_optimizer": True})
    assert saved == pytest.approx(14.20 - 12.49, rel=0.03)


BARE_CONTEXT = 0.5


@pytest.mark.parametrize(
    ("parallel", "ranks", "gib"),
    [({}, 1, 0.24), (SPLIT, 2, 0.51), ({"pipeline_model_parallel_size": 2}, 2, 0.62), ({}, 2, 0.51)],
    ids=["1 GPU", "TP2", "PP2", "DP2"],
)
def test_a_sleeper_leaves_what_was_measured(parallel: Any, ranks: int, gib: float) -> None:
    closing = engine(parallel, keep_communicators=False)
    asleep = trainer_memory(SIXTEEN_LAYERS, closing, ranks, Workload(2048, sleeps=True)).asleep
    assert asleep / GIB - BARE_CONTEXT == pytest.approx(gib, abs=0.1)


def test_a_trainer_of_two_gpus_holds_the_communicators_that_were_measured() -> None:
    # TP2, after two updates and before any sleep, by the driver's count less what torch had reserved: 10.30 - 8.21.
    memory = trainer_memory(SIXTEEN_LAYERS, engine(SPLIT), 2, Workload(2048, sleeps=True))
    assert memory.awake["runtime"] / GIB - BARE_CONTEXT == pytest.approx(2.09, rel=0.05)


@pytest.mark.parametrize(
    ("parallel", "gib"),
    # Tensor-parallel ranks, all of them twice, and what weights are gathered over; replicas meet in four groups.
    [(SPLIT, 3 * 0.53 + 0.4), ({}, 4 * 0.53)],
    ids=["TP2", "DP2"],
)
def test_communicators_that_stay_are_counted_of_a_sleeper_too(parallel: Any, gib: float) -> None:
    work = Workload(2048, bucket_bytes=2**28, sleeps=True)
    keeps, closes = (
        trainer_memory(SIXTEEN_LAYERS, engine(parallel, keep_communicators=keep), 2, work) for keep in (True, False)
    )
    assert (keeps.asleep - closes.asleep) / GIB == pytest.approx(gib, rel=0.01)
    # Those that closed connect again what passes and updates need.
    assert keeps.asleep - closes.asleep > keeps.awake["runtime"] - closes.awake["runtime"] > 0.5 * GIB


def test_a_rank_alone_has_no_communicators() -> None:
    alone = trainer_memory(SIXTEEN_LAYERS, engine(), 1, Workload(2048, sleeps=True))
    assert alone.asleep == alone.awake["runtime"]
    assert alone.asleep / GIB - BARE_CONTEXT == pytest.approx(0.24, abs=0.01)


def test_states_of_a_mixture_match_its_template() -> None:
    # dag_templates/qwen3_30b_a3b_8gpu.yaml: 67 GiB a GPU.
    spec = engine({**SPLIT, "expert_model_parallel_size": 8}, transformer=FULL)
    memory = trainer_memory(QWEN3_30B, spec, 8, Workload(16384))
    assert sum(memory.awake[kind] for kind in ("weights", "gradients", "optimizer")) / GIB == pytest.approx(67, abs=0.5)


def test_a_layer_keeps_what_is_counted_by_hand() -> None:
    # Bytes for a token in bfloat16, with h = 2048, as many for queries, half for keys, three times as many in the MLP:
    # input, norm, residual and norm 8h; queries and keys before their norms 3h, and behind them with values 4h;
    # attention's output 2h; gate, up and act 18h. Together 35h, and 4 bytes for each of 16 heads.
    (stage,) = stages_of(engine(), QWEN3_1B7.layers)
    kept = stage_activations(QWEN3_1B7, engine(), stage, tokens=1, micro_batches=1).kept
    assert kept == 28 * (35 * 2048 + 4 * 16)


def states(parallel: dict[str, Any], ranks: int, **sections: Any) -> dict[str, int]:
    memory = trainer_memory(QWEN3_8B, engine(parallel, **sections), ranks, Workload(16384))
    return {kind: memory.awake[kind] for kind in ("weights", "gradients", "optimizer")}


def test_replicas_share_the_optimizer_and_nothing_else() -> None:
    one, four = states({}, 1), states({}, 4)
    assert four == {**one, "optimizer": pytest.approx(one["optimizer"] / 4, rel=1e-6)}
    # Ranks that share sequences hold the same weights.
    assert states({"context_parallel_size": 4}, 4) == four
    whole = states({}, 4, optimizer={"use_distributed_optimizer": False})
    assert whole["optimizer"] == one["optimizer"]


def test_bytes_of_states_follow_their_numbers() -> None:
    parameters = states({}, 1)["weights"] // 2
    assert states({}, 1) == {"weights": 2 * parameters, "gradients": 4 * parameters, "optimizer": 12 * parameters}
    assert states({}, 1, ddp={"grad_reduce_in_fp32": False})["gradients"] == 2 * parameters
    small = {"exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16", "use_precision_aware_optimizer": True}
    assert states({}, 1, optimizer=small)["optimizer"] == 6 * parameters
    assert states({}, 1, transformer={"bf16": False}) == {
        "weights": 4 * parameters,
        "gradients": 4 * parameters,
        "optimizer": 8 * parameters,
    }


def activations(shape: ModelShape = QWEN3_8B, tokens: int = 16384, ranks: int = 8, **sections: Any) -> int:
    memory = trainer_memory(shape, engine(sections.pop("parallel", {}), **sections), ranks, Workload(tokens))
    return memory.awake["activations"]


def test_layouts_and_recomputation_make_activations_smaller() -> None:
    plain = activations()
    assert activations(tokens=8192) < 0.6 * plain
    assert activations(parallel={"context_parallel_size": 2}) < 0.6 * plain
    split, sequence = activations(parallel={**SPLIT, "sequence_parallel": False}), activations(parallel=SPLIT)
    assert sequence < 0.55 * plain and sequence < split < plain
    full = activations(transformer=FULL)
    assert full < 0.15 * plain
    # Inputs of 36 layers, in 36 or 9 pieces; but four layers come back together.
    assert activations(transformer=FULL | {"recompute_num_layers": 4}) < activations(transformer={}) / 3
    block = activations(transformer=FULL | {"recompute_method": "block", "recompute_num_layers": 18})
    assert full < block < plain
    for modules in (["layernorm"], ["mlp"]):
        some = activations(transformer={"recompute_granularity": "selective", "recompute_modules": modules})
        assert full < some < plain
    assert activations(transformer={"recompute_granularity": "selective"}) == plain


def test_the_first_stage_is_the_fullest_and_says_so() -> None:
    memory = trainer_memory(QWEN3_8B, engine({"pipeline_model_parallel_size": 4}), 8, Workload(16384))
    assert memory.moment == "update, stage 1 of 4"
    # Four micro-batches of a quarter of the layers: as many activations as one stage of all layers has.
    assert memory.awake["activations"] == pytest.approx(activations(), rel=0.05)
    few = Workload(16384, micro_batches=1)
    assert trainer_memory(QWEN3_8B, engine({"pipeline_model_parallel_size": 4}), 8, few).peak < memory.peak
    interleaved = {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}
    assert activations(parallel=interleaved) > activations(parallel={"pipeline_model_parallel_size": 2})


def test_logits_in_chunks_take_little() -> None:
    def logits(**sections: Any) -> float:
        return trainer_memory(QWEN3_8B, engine(**sections), 1, Workload(16384)).awake["logits"] / GIB

    # 16384 x 152576 in bfloat16, and their gradient: 9.3 GiB; twice the hidden states: 0.25.
    assert logits() == pytest.approx(9.3125 + 0.25, abs=0.01)
    # Two chunks of 256 MiB and their gradients, and the output layer's gradient in float32.
    assert logits(fused_linear_cross_entropy=True) == pytest.approx(1 + 0.25 + 2.33, abs=0.02)
    # Gradients overwrite the logits of five chunks, which takes half as much where all rows are one chunk.
    fused = engine(fused_linear_cross_entropy=True)
    for tokens, summed, chunks in ((16384, True, 1.25), (512, False, 0.29), (512, True, 0.145)):
        work = Workload(tokens, sums_over_tokens=summed)
        expected = chunks + tokens / 65536 + 2.33
        assert trainer_memory(QWEN3_8B, fused, 1, work).awake["logits"] / GIB == pytest.approx(expected, abs=0.02)
    # A critic's are there in float32 too, with their gradient.
    assert logits(head="value") == 0.25 + 0.5
    assert logits(head="reward") == 0.25


def test_offloaded_state_is_on_the_host_and_not_in_the_peak() -> None:
    plain = trainer_memory(QWEN3_8B, engine(SPLIT), 2, Workload(16384))
    away = trainer_memory(QWEN3_8B, engine(SPLIT, offload=EVERYTHING), 2, Workload(16384))
    assert "optimizer" not in away.awake or away.awake["optimizer"] == 0 or away.moment == "optimizer's step"
    assert away.peak < plain.peak and plain.host == 0
    assert away.host == plain.awake["weights"] + plain.awake["optimizer"]


def test_a_sleeper_and_a_frozen_copy_wait_on_the_host() -> None:
    plain = trainer_memory(QWEN3_8B, engine(), 1, Workload(16384))
    asleep = trainer_memory(QWEN3_8B, engine(), 1, Workload(16384, sleeps=True))
    assert asleep.host == plain.awake["weights"] + plain.awake["optimizer"]
    copied = trainer_memory(QWEN3_8B, engine(), 1, Workload(16384, keeps_start_weights=True, sleeps=True))
    assert copied.host == asleep.host + plain.awake["weights"]
    averaged = trainer_memory(QWEN3_8B, engine(), 1, Workload(16384, keeps_average=True, sleeps=True))
    # Float32, beside bfloat16.
    assert averaged.host == asleep.host + 3 * plain.awake["weights"]
    assert plain.asleep < plain.weights_alone < plain.peak
    saved = trainer_memory(QWEN3_8B, engine(), 1, Workload(16384, saves_in_background=True, sleeps=True))
    assert saved.host == 2 * asleep.host


def test_an_engine_that_never_trains_has_weights_alone() -> None:
    frozen = trainer_memory(QWEN3_1B7, engine(), 1, Workload(0, logprob_tokens=16384))
    assert {kind for kind, nbytes in frozen.awake.items() if nbytes} <= {
        "weights",
        "logits",
        "activations",
        "allocator",
        "runtime",
    }


def test_latent_attention_and_experts_are_counted() -> None:
    # Of 671 billion parameters, 653 are of experts, over 16 stages and 16 ranks, and 18 are over 16 stages alone.
    layout = {"pipeline_model_parallel_size": 16, "expert_model_parallel_size": 16, "context_parallel_size": 1}
    fields = {**FULL, "num_layers_in_first_pipeline_stage": 4, "num_layers_in_last_pipeline_stage": 1}
    memory = trainer_memory(DEEPSEEK_V3, engine(layout, transformer=fields), 256, Workload(4096))
    assert memory.awake["weights"] / GIB == pytest.approx((653 / 256 + 18 / 16) * 2e9 / GIB, rel=0.03)
    assert 0 < memory.awake["activations"] / GIB < 20
    # Values of one token in a layer: norms and residual 4 x 7168; compressed 2 x 1536 + 2 x 512 + 64; 128 heads with
    # queries 2 x 192, keys 128 + 192, values 2 x 128, outputs 128; the MLP 3 x 18432, or 3 x 2048 for the shared expert
    # and 7168 + 3 x 2048 for each of 8; and in float32 128 denominators and 4 numbers for each of 256 experts.
    attention = 4 * 7168 + 2 * 1536 + 2 * 512 + 64 + 128 * (2 * 192 + 128 + 192 + 2 * 128 + 128)
    dense = 2 * (attention + 3 * 18432) + 4 * 128
    mixture = 2 * (attention + 3 * 2048 + 8 * (7168 + 3 * 2048)) + 4 * 128 + 4 * 4 * 256
    (stage,) = stages_of(engine(), 61)
    assert stage_activations(DEEPSEEK_V3, engine(), stage, 1, 1).kept == 3 * dense + 58 * mixture


SHAPES = (QWEN3_1B7, QWEN3_8B, QWEN3_30B, SIXTEEN_LAYERS)
POWERS = st.sampled_from([1, 2, 4])


@given(
    shape=st.sampled_from(SHAPES),
    tensor=POWERS,
    stages=POWERS,
    context=POWERS,
    replicas=POWERS,
    head=st.sampled_from(["lm", "value"]),
)
def test_ranks_of_any_layout_hold_the_model_and_nothing_twice(
    shape: ModelShape, tensor: int, stages: int, context: int, replicas: int, head: str
) -> None:
    sizes = {"tensor_model_parallel_size": tensor, "pipeline_model_parallel_size": stages}
    layout = {**sizes, "context_parallel_size": context, "sequence_parallel": tensor > 1}
    spec = engine(layout, head=head)
    held = [rank_parameters(shape, spec, stage) for stage in stages_of(spec, shape.layers)]
    whole = sum(shape.layer(index).whole for index in shape.positions) + shape.final_norm
    vocabulary = padded_vocab_size(shape.vocabulary, tensor) * shape.hidden
    output = 0 if head == "value" or (shape.tied and stages == 1) else vocabulary
    layers = sum(shape.layer(index).total for index in shape.positions)
    cut = layers + shape.final_norm - whole + vocabulary + output
    extra = shape.hidden if head == "value" else 0
    dense = sum(each.dense for each in held) * tensor
    # Experts are whole on every tensor-parallel rank, unless they have ranks of their own.
    experts = sum(each.experts for each in held)
    assert dense + experts == cut + tensor * (whole + extra)
    memory = trainer_memory(shape, spec, tensor * stages * context * replicas, Workload(4096, bucket_bytes=2**28))
    assert all(nbytes >= 0 for nbytes in memory.awake.values())
    assert 0 < memory.asleep <= memory.weights_alone <= memory.peak


def test_on_cpu_slots_all_is_float32_and_the_hosts() -> None:
    on_cpu = trainer_memory(SIXTEEN_LAYERS, engine(), 1, Workload(2048), on_gpu=False)
    on_gpu = trainer_memory(SIXTEEN_LAYERS, engine(), 1, Workload(2048))
    assert on_cpu.awake["weights"] == 2 * on_gpu.awake["weights"]
    assert on_cpu.awake["runtime"] == on_cpu.asleep == 0
    assert on_cpu.weights_alone == on_cpu.awake["weights"]


def test_adapters_alone_are_trained() -> None:
    """8B on 22 GiB, where a sync needs no more than the adapters; 30B-A3B on 140."""
    update = {"update_tokens": 2048, "logprob_tokens": 2048, "bucket_bytes": 2**28}
    small = {"transformer": FULL, "fused_linear_cross_entropy": True}
    alone = engine(lora={"merge": False}, offload={"param": True}, **small)
    memory = trainer_memory(QWEN3_8B, alone, 1, Workload(**update))
    assert memory.peak < 19 * GIB and memory.weights_alone < 2 * GIB
    merged = trainer_memory(QWEN3_8B, engine(lora={}, offload={"param": True}, **small), 1, Workload(**update))
    assert merged.weights_alone > 15 * GIB
    mixture = trainer_memory(QWEN3_30B, engine(lora={}), 1, Workload(8192))
    everything = trainer_memory(QWEN3_30B, engine(), 1, Workload(8192))
    assert mixture.peak < 139 * GIB < 500 * GIB < everything.peak


def test_the_keys_of_a_shared_prompt_are_held_once_for_each_response() -> None:
    work = Workload(4096 + 8 * 512, prompt_tokens=4096, row_tokens=4096 + 512, rows_per_prompt=8)
    alone = trainer_memory(QWEN3_8B, engine(), 1, work)
    shared = trainer_memory(QWEN3_8B, engine(prefix_sharing=True), 1, work)
    keys_and_values = 8 * 4096 * 2 * 8 * 128 * 2
    kept = QWEN3_8B.layers * keys_and_values
    assert shared.awake["activations"] - alone.awake["activations"] == pytest.approx(kept, rel=0.1)
    # With adapters, so that one layer takes more than the output layer and its gradient.
    few = {"transformer": FULL, "fused_linear_cross_entropy": True, "lora": {}}
    again = trainer_memory(QWEN3_8B, engine(prefix_sharing=True, **few), 1, work)
    fewer = trainer_memory(QWEN3_8B, engine(**few), 1, work)
    assert 0 < again.awake["activations"] - fewer.awake["activations"] < 5 * keys_and_values
