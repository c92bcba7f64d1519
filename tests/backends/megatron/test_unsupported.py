"""What clashes with dagrl's step, which values do not, and where that depends on the layout."""

import dataclasses

import pytest

from dagrl.backends.megatron.section import MegatronEngineSpec
from dagrl.backends.megatron.unsupported import CLASHES, clashes_of
from dagrl.validation import check_file

PP, VPP = "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size"
EP = "expert_model_parallel_size"
INTERLEAVED = {PP: 2, VPP: 2}


def told(section: str, field: str, value: object, parallel: dict | None = None, **sections: dict) -> str | None:
    engine = MegatronEngineSpec(
        backend="megatron", group="train", parallel=parallel or {}, **{section: {field: value}}, **sections
    )
    found = list(clashes_of(engine))
    assert len(found) < 2, "a field is told once"
    if not found:
        return None
    assert found[0][:2] == (section, field)
    assert "; " in found[0][2], "no word on what to do"
    return found[0][2]


@pytest.mark.parametrize(
    ("section", "field", "value", "fragment"),
    [
        ("transformer", "tensor_model_parallel_size", 1, "say it as `parallel.tensor_model_parallel_size`"),
        ("transformer", "virtual_pipeline_model_parallel_size", 2, "`parallel.virtual_pipeline_model_parallel_size`"),
        ("transformer", "num_layers", 4, "follows from the model"),
        ("transformer", "moe_router_topk", 2, "follows from the model"),
        ("transformer", "calculate_per_token_loss", False, "must be true, for the loss is a mean"),
        ("transformer", "params_dtype", "bfloat16", "follows from `bf16`"),
        ("transformer", "fp16", True, "is not how dagrl trains"),
        ("transformer", "variable_seq_lengths", False, "follows from the layout"),
        ("transformer", "tensor_parallel_num_weight_shards", 2, "ranks that the layout does not know of"),
        ("transformer", "cp_comm_type", "a2a+p2p", "choose p2p, all_gather or a2a"),
        ("transformer", "cp_comm_type", ["p2p", "a2a+p2p"], "choose p2p, all_gather or a2a"),
        ("transformer", "overlap_p2p_comm", True, "is for the interleaved schedule"),
        ("transformer", "defer_embedding_wgrad_compute", True, "its gradient would be lost"),
        ("transformer", "mtp_num_layers", 1, "no loss of dagrl trains"),
        ("transformer", "tp_comm_overlap", True, "one fixed length"),
        ("transformer", "cuda_graph_impl", "local", "one fixed length"),
        ("transformer", "hidden_dropout", 0.1, "draws noise in training only"),
        ("transformer", "moe_expert_capacity_factor", 1.0, "log-probs depend on the packing"),
        ("transformer", "moe_router_load_balancing_type", "sinkhorn", "routes tokens by what they are packed with"),
        ("transformer", "moe_router_load_balancing_type", ["aux_loss", "sinkhorn"], "choose aux_loss, global_aux_loss"),
        ("transformer", "moe_router_load_balancing_type", "seq_aux_loss", "takes a whole pack for one sequence"),
        (
            "transformer",
            "moe_router_load_balancing_type",
            ["aux_loss", "seq_aux_loss"],
            "a whole pack for one sequence",
        ),
        ("transformer", "moe_single_grouped_weight", True, "one parameter of another name"),
        ("transformer", "moe_router_force_load_balancing", True, "by chance, not by the model"),
        ("transformer", "overlap_moe_expert_parallel_comm", True, "a schedule of its own"),
        ("transformer", "cross_entropy_loss_fusion", True, "fused_linear_cross_entropy"),
        ("optimizer", "min_lr", 0.0, "say it as `lr_schedule.min_lr`"),
        ("optimizer", "bf16", True, "say `transformer.bf16`"),
        ("optimizer", "loss_scale", 1024.0, "would divide gradients"),
        ("optimizer", "optimizer", "muon", "choose adam or sgd"),
        ("optimizer", "overlap_param_gather", True, "say it as `ddp.overlap_param_gather`"),
        ("ddp", "use_distributed_optimizer", True, "say it as `optimizer.use_distributed_optimizer`"),
        ("ddp", "average_in_collective", True, "parts of one global loss"),
        ("ddp", "use_megatron_fsdp", True, "another way to hold a model"),
        ("ddp", "num_distributed_optimizer_instances", 2, "leave it at 1"),
    ],
)
def test_what_clashes_is_told_with_the_reason(section, field, value, fragment):
    assert fragment in (told(section, field, value) or "nothing is told")


@pytest.mark.parametrize(
    ("section", "field", "value"),
    [
        ("transformer", "calculate_per_token_loss", True),
        ("transformer", "recompute_granularity", "selective"),
        ("transformer", "attention_dropout", 0.0),
        ("transformer", "hidden_dropout", 0),
        ("transformer", "cp_comm_type", ["p2p", "a2a"]),
        ("transformer", "cuda_graph_impl", "none"),
        ("transformer", "moe_router_load_balancing_type", ["aux_loss", "global_aux_loss"]),
        ("transformer", "moe_single_grouped_weight", False),
        ("transformer", "moe_aux_loss_coeff", 0.01),
        ("transformer", "moe_token_dispatcher_type", "allgather"),
        ("transformer", "overlap_p2p_comm", False),
        ("optimizer", "optimizer", "sgd"),
        ("optimizer", "optimizer_cpu_offload", True),
        ("ddp", "overlap_grad_reduce", True),
        ("ddp", "overlap_param_gather", True),
        ("ddp", "use_megatron_fsdp", False),
    ],
)
def test_what_does_not_clash_passes(section, field, value):
    assert told(section, field, value) is None


@pytest.mark.parametrize(
    ("field", "value", "parallel", "fragment"),
    [
        # The interleaved schedule of two stages is wrong without both, silently.
        ("overlap_p2p_comm", True, INTERLEAVED, None),
        ("batch_p2p_comm", False, INTERLEAVED, None),
        ("overlap_p2p_comm", False, INTERLEAVED, "must be true with virtual pipeline stages"),
        ("batch_p2p_comm", True, INTERLEAVED, "must be false with virtual pipeline stages"),
        ("batch_p2p_comm", True, {PP: 2}, None),
        ("overlap_p2p_comm", True, {PP: 2}, "set parallel.virtual_pipeline_model_parallel_size"),
        # The allgather dispatcher takes no lengths that vary between stages.
        ("moe_token_dispatcher_type", "allgather", {PP: 2}, "choose alltoall"),
        ("moe_token_dispatcher_type", "alltoall", {PP: 2}, None),
        ("moe_token_dispatcher_type", "allgather", {EP: 2}, None),
    ],
)
def test_some_clashes_depend_on_the_layout(field, value, parallel, fragment):
    message = told("transformer", field, value, parallel)
    assert message is None if fragment is None else fragment in (message or "nothing is told")


def test_gathering_parameters_needs_an_optimizer_that_shares_them_out():
    assert told("ddp", "overlap_param_gather", True, optimizer={"use_distributed_optimizer": True}) is None
    message = told("ddp", "overlap_param_gather", True, optimizer={"use_distributed_optimizer": False})
    assert message is not None
    assert "set optimizer.use_distributed_optimizer to true" in message


def test_validate_tells_of_a_clash_in_its_line(project):
    path = project.pipeline(("    group: train\n", "    group: train\n    transformer: {tp_comm_overlap: true} #!\n"))
    project.assert_problem(path, "engines.actor.transformer.tp_comm_overlap", "packs vary in length; take it out")
    path = project.pipeline(("    group: train\n", "    group: train\n    transformer: {tp_comm_overlap: false}\n"))
    check_file(path)


def test_every_field_of_the_table_is_one_that_megatron_has():
    pytest.importorskip("megatron.core")
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer import MLATransformerConfig

    configs = {"transformer": MLATransformerConfig, "optimizer": OptimizerConfig, "ddp": DistributedDataParallelConfig}
    for section, config in configs.items():
        named = {field for clash in CLASHES[section] for field in clash.fields}
        assert named - {field.name for field in dataclasses.fields(config)} == set()
