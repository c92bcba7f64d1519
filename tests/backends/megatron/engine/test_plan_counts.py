"""What the plan counts on a rank is what Megatron builds: parameters and layers, in every layout that is tested."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from layout_cases import DENSE, LATENT, MIXTURE, SHARED_KEYS, parallel_of

from dagrl.backends.families.registry import shape_of
from dagrl.backends.megatron.planning.stages import rank_parameters, stages_of
from dagrl.backends.megatron.section import MegatronEngineSpec

LAYOUTS = {
    **{f"qwen3_tied {name}": layout for name, layout in DENSE.items()},
    **{f"qwen2 {name}": DENSE[name] for name in ("tp2-sp", "pp4")},
    **{f"llama {name}": DENSE[name] for name in ("tp2", "tp2-pp2-vpp2")},
    **{f"qwen3 {name}": layout for name, layout in SHARED_KEYS.items()},
    **{f"qwen3_moe_mixed {name}": layout for name, layout in MIXTURE.items()},
    **{f"mixtral {name}": MIXTURE[name] for name in ("ep2", "etp2-tp2", "ep2-tp2-pp2")},
    **{f"deepseek_v3 {name}": layout for name, layout in LATENT.items()},
    **{f"deepseek_v3_moonlight {name}": LATENT[name] for name in ("pp2", "tp2-ep2")},
}
UNEVEN = {
    "first": {"num_layers_in_first_pipeline_stage": 1},
    "last": {"num_layers_in_last_pipeline_stage": 1},
    "both": {"num_layers_in_first_pipeline_stage": 3, "num_layers_in_last_pipeline_stage": 1},
    "layout": {"pipeline_model_parallel_layout": "Et|(tt)*1|tL"},
    "list": {"pipeline_model_parallel_layout": [["embedding"], ["decoder"] * 4, ["loss"]]},
}


def spec_of(layout: dict[str, Any], head: Any = "lm", **transformer: Any) -> MegatronEngineSpec:
    return MegatronEngineSpec.model_validate(
        {"backend": "megatron", "group": "all", "parallel": layout, "head": head, "transformer": transformer}
    )


def built(model: Any, spec: MegatronEngineSpec, ranks: int) -> list[tuple[list[list[int]], int, int]]:
    """Of the first rank of each stage: its chunks' layers, parameters without experts and those of experts."""
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from dagrl.backends.megatron.engine.config import transformer_config
    from dagrl.backends.megatron.engine.model import build_model

    found = []
    stages = spec.parallel.pipeline_model_parallel_size
    for rank in range(0, ranks, ranks // stages):
        # Groups that only count their members: nothing is sent while a model is built.
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
        parallel_state.initialize_model_parallel(
            **spec.parallel.model_dump(exclude={"sequence_parallel"}), create_gloo_process_groups=False
        )
        model_parallel_cuda_manual_seed(1, force_reset_rng=True)
        chunks = build_model(model.config, spec, transformer_config(model.config, spec))
        counts = [0, 0]
        for name, parameter in itertools.chain.from_iterable(chunk.named_parameters() for chunk in chunks):
            counts[".mlp.experts." in name] += parameter.numel()
        layers = [[layer.layer_number - 1 for layer in chunk.decoder.layers] for chunk in chunks]
        found.append((layers, *counts))
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
    return found


def counted(model: Any, spec: MegatronEngineSpec) -> list[tuple[list[list[int]], int, int]]:
    shape = shape_of(model.config.to_dict())
    found = []
    for stage in stages_of(spec, shape.layers):
        parameters = rank_parameters(shape, spec, stage)
        found.append(([list(chunk) for chunk in stage.chunks], parameters.dense, parameters.experts))
    return found


def test_ranks_hold_what_the_plan_counts_in_every_layout(run_ranks, hf_model_of):
    cases = {
        name: (hf_model_of(name.partition(" ")[0]), spec_of(parallel_of(layout)), ranks)
        for name, (ranks, layout) in LAYOUTS.items()
    }
    (found,) = run_ranks(1, lambda rank: {name: built(*case) for name, case in cases.items()}, joined=False)
    for name, (model, spec, _) in cases.items():
        assert counted(model, spec) == found[name], name


@pytest.mark.parametrize("head", ["value", "reward"])
def test_a_scalar_head_takes_the_place_of_the_output_layer(run_ranks, hf_model_of, head):
    model, spec = hf_model_of("qwen3_tied"), spec_of({"pipeline_model_parallel_size": 2}, head)
    (found,) = run_ranks(1, lambda rank: built(model, spec, 2), joined=False)
    assert counted(model, spec) == found


def test_uneven_stages_are_megatrons(run_ranks, hf_model_of):
    model = hf_model_of("qwen3")
    specs = {
        name: spec_of({"pipeline_model_parallel_size": 2 if name in ("both", "first", "last") else 3}, **fields)
        for name, fields in UNEVEN.items()
    }
    # Four layers, an embedding and a loss on three stages of two.
    accounted = {f"account_for_{what}_in_pipeline_split": True for what in ("embedding", "loss")}
    specs["accounted"] = spec_of({"pipeline_model_parallel_size": 3}, **accounted)

    def on_rank(rank: int) -> dict[str, Any]:
        return {name: built(model, spec, spec.parallel.pipeline_model_parallel_size) for name, spec in specs.items()}

    (found,) = run_ranks(1, on_rank, joined=False)
    for name, spec in specs.items():
        assert counted(model, spec) == found[name], name


def test_layers_that_cannot_be_shared_out_are_refused():
    with pytest.raises(ValueError, match="5 layers do not lie evenly on 2 pipeline stages; choose a divisor"):
        stages_of(spec_of({"pipeline_model_parallel_size": 2}), 5)
    with pytest.raises(ValueError, match="has 3 parts, which 2 pipeline stages do not divide"):
        stages_of(spec_of({"pipeline_model_parallel_size": 2}, pipeline_model_parallel_layout="Et|t|L"), 2)


@pytest.mark.parametrize(
    ("sizes", "micro_batches", "in_flight"),
    [
        # Forward passes that come before a stage's first backward pass: one for each stage to come, and its own.
        ((4, None), 16, [4, 3, 2, 1]),
        ((4, None), 2, [2, 2, 2, 1]),
        ((1, None), 16, [1]),
        # 2 x (stages to come) + (chunks - 1) x stages + 1 chunks, two to a stage: (2 + 2 + 1) / 2 and (0 + 2 + 1) / 2.
        ((2, 2), 16, [2.5, 1.5]),
        ((2, 2), 1, [1, 1]),
    ],
)
def test_micro_batches_under_way(sizes, micro_batches, in_flight):
    stages, chunks = sizes
    layout = {"pipeline_model_parallel_size": stages, "virtual_pipeline_model_parallel_size": chunks}
    found = [stage.in_flight(micro_batches) for stage in stages_of(spec_of(layout), 8)]
    assert found == in_flight
