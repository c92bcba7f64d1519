"""From nodes and engines to what is asked of an engine."""

from __future__ import annotations

from pathlib import Path

from dagrl.backends.families.registry import model_shape
from dagrl.backends.fit import engine_memory
from dagrl.backends.planning.gpus import gpu_named
from dagrl.backends.planning.memory import EngineMemory
from dagrl.config.loading.loader import load_pipeline
from dagrl.graph.inference import build_graph
from dagrl.scheduler.placement import make_plan

TEMPLATE = Path(__file__).parents[3] / "dag_templates" / "qwen3_8b_megatron.yaml"
NO_KL = ("nodes.update.loss.kl_coef=0",)
APART = ("groups={gpu: {gpus_per_node: 8}, other: {gpus_per_node: 8}}", "engines.generator.group=other")


def memory_of(engine: str, *overrides: str) -> EngineMemory:
    loaded = load_pipeline(TEMPLATE, overrides)
    plan = make_plan(loaded.pipeline, build_graph(loaded.pipeline, loaded.folder, loaded.positions))
    return engine_memory(loaded.pipeline, plan, engine, model_shape(loaded.pipeline.model), gpu_named("H200"))


def test_an_update_is_counted_at_its_budget_of_tokens() -> None:
    half = memory_of("actor", "nodes.update.tokens_per_micro_batch=8192").awake["activations"]
    assert half < 0.55 * memory_of("actor").awake["activations"]
    # Two samples of at most 1024 + 2048 tokens: less than the budget, and no more micro-batches than samples.
    few = memory_of("actor", "data.prompts_per_step=1", "nodes.rollout.n=2")
    some = memory_of("actor", "nodes.rollout.n=2", "nodes.update.mini_batch=1")
    assert few.awake == some.awake and few.awake["activations"] < 0.5 * half


def test_a_frozen_copy_waits_on_the_host_of_an_engine_that_trains() -> None:
    with_copy, without = memory_of("actor"), memory_of("actor", "engines.reference=null", "nodes.ref=null", *NO_KL)
    assert with_copy.host - without.host == with_copy.awake["weights"]


def test_an_engine_with_a_group_to_itself_never_sleeps() -> None:
    unsaid = "engines.generator.server.mem_fraction_static=null"
    alone, shared = memory_of("generator", unsaid, *APART), memory_of("generator", unsaid)
    assert alone.awake["cache"] > shared.awake["cache"], "SGLang's own share of the GPU"
    assert alone.awake["buffers"] == 2 * 256 * 2**20
    assert memory_of("actor", *APART).host == memory_of("actor").awake["weights"], "the frozen copy alone"


def test_a_frozen_engine_of_its_own_has_weights_alone() -> None:
    own = (
        "engines.reference={backend: megatron, group: frozen}",
        "groups={gpu: {gpus_per_node: 8}, frozen: {gpus_per_node: 1}}",
    )
    reference = memory_of("reference", *own)
    assert reference.moment == "log-probs"
    assert reference.awake.get("optimizer", 0) == reference.awake.get("gradients", 0) == 0
    assert reference.awake["weights"] > 2 * 8.1e9


def test_a_model_inside_a_worker_is_counted() -> None:
    hf = memory_of("generator", "engines.generator={backend: hf, group: gpu, weights_from: actor}")
    assert hf.awake["weights"] == 2 * 8_190_735_360
    assert hf.moment == "rollout"
