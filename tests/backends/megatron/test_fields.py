"""Tested fields of Megatron's configs: what their values may be, and what becomes of all other fields."""

from typing import get_args

import pytest

from dagrl.backends.megatron.fields import _PARALLEL, _NumberFormat
from dagrl.backends.megatron.section import MegatronEngineSpec, ParallelSpec
from dagrl.model_files.number_formats import NUMBER_FORMATS
from dagrl.validation import check_file

GPUS = ("train: {cpus_per_node: 2}", "train: {gpus_per_node: 2}")
WRONG = [
    ("transformer", "recompute_granlarity: full", "untested-field", "`recompute_granularity`"),
    ("transformer", "no_such_thing_at_all_here: 1", "untested-field", "extra: {transformer: {"),
    ("transformer", "init_method: normal", "untested-field", "init_method"),
    ("transformer", "tp_comm_overlap: true", "untested-field", "tp_comm_overlap"),
    ("transformer", "cuda_graph_impl: local", "untested-field", "cuda_graph_impl"),
    ("transformer", "cp_comm_type: a2a+p2p", "untested-field", "cp_comm_type"),
    ("transformer", "fp8_margin: 1", "untested-field", "fp8_margin"),
    ("transformer", "fp8: mxfp8", "unknown-option", "hybrid"),
    ("transformer", "fp8_recipe: mxfp8", "unknown-option", "blockwise"),
    ("transformer", "fp8_param: true", "refused-key", "bfloat16"),
    ("transformer", "moe_expert_capacity_factor: 1.0", "untested-field", "moe_expert_capacity_factor"),
    ("transformer", "moe_router_force_load_balancing: true", "untested-field", "moe_router_force_load_balancing"),
    ("transformer", "cross_entropy_loss_fusion: true", "untested-field", "cross_entropy_loss_fusion"),
    ("transformer", "cache_mla_latents: true", "untested-field", "cache_mla_latents"),
    ("transformer", "recompute_granularity: ful", "unknown-option", "`full`"),
    ("transformer", "recompute_num_layers: 1.5", "invalid-value", "integer"),
    ("transformer", "recompute_num_layers: 0", "invalid-value", "greater"),
    ("transformer", "recompute_modules: mlp", "invalid-value", "list"),
    ("transformer", "attention_backend: flahs", "unknown-option", "`flash`"),
    ("transformer", "moe_router_dtype: 16", "unknown-option", "fp32"),
    ("transformer", "moe_router_load_balancing_type: sinkhorn", "invalid-value", "aux_loss"),
    ("transformer", "moe_token_dispatcher_type: flex", "unknown-option", "alltoall"),
    ("transformer", "q_lora_rank: 8", "refused-key", "model"),
    ("transformer", "num_layers: 4", "refused-key", "model"),
    ("transformer", "tensor_model_parallel_size: 2", "refused-key", "`parallel.tensor_model_parallel_size`"),
    ("transformer", "sequence_parallel: true", "refused-key", "`parallel.sequence_parallel`"),
    ("transformer", "calculate_per_token_loss: false", "refused-key", "mean"),
    ("transformer", "params_dtype: bfloat16", "refused-key", "`bf16`"),
    ("transformer", "fp16: true", "refused-key", "`transformer.bf16`"),
    ("transformer", "variable_seq_lengths: false", "refused-key", "layout"),
    ("transformer", "overlap_p2p_comm: true", "refused-key", "layout"),
    ("transformer", "hidden_dropout: 0.1", "refused-key", "chance"),
    ("transformer", "moe_enable_routing_replay: true", "refused-key", "`router_replay`"),
    ("optimizer", "clip_gard: 1.0", "untested-field", "`clip_grad`"),
    ("optimizer", "overlap_param_gather_with_optimizer_step: true", "untested-field", "overlap_param_gather_with"),
    ("optimizer", "optimizer: muon", "unknown-option", "adam"),
    ("optimizer", "exp_avg_dtype: bf61", "unknown-option", "`bf16`"),
    ("optimizer", "clip_grad: -1.0", "invalid-value", "0"),
    ("optimizer", "weight_decay: .nan", "invalid-value", "finite"),
    ("optimizer", "adam_beta1: 1", "invalid-value", "less than 1"),
    ("optimizer", "adam_beta2: 2.0", "invalid-value", "less than 1"),
    ("optimizer", "sgd_momentum: -0.1", "invalid-value", "0"),
    ("optimizer", "adam_eps: 0", "invalid-value", "greater than 0"),
    ("optimizer", "adam_eps: -1e-8", "invalid-value", "greater than 0"),
    ("optimizer", "optimizer_offload_fraction: 0", "invalid-value", "greater than 0"),
    ("optimizer", "optimizer_offload_fraction: 1.5", "invalid-value", "1"),
    ("optimizer", "min_lr: 1e-4", "refused-key", "`lr_schedule.min_lr`"),
    ("optimizer", "bf16: true", "refused-key", "`transformer.bf16`"),
    ("optimizer", "loss_scale: 1024.0", "refused-key", "fp16"),
    ("optimizer", "overlap_param_gather: true", "refused-key", "`ddp.overlap_param_gather`"),
    ("ddp", "overlap_grad_reduc: true", "untested-field", "`overlap_grad_reduce`"),
    ("ddp", "num_distributed_optimizer_instances: 2", "untested-field", "num_distributed_optimizer_instances"),
    ("ddp", "overlap_grad_reduce: 1", "invalid-value", "true or false"),
    ("ddp", "bucket_size: -1", "invalid-value", "greater"),
    ("ddp", "use_distributed_optimizer: true", "refused-key", "`optimizer.use_distributed_optimizer`"),
    ("ddp", "average_in_collective: true", "refused-key", "global loss"),
    ("ddp", "use_megatron_fsdp: true", "refused-key", "FSDP"),
]


def engine(section: str, field: str, *more: str) -> tuple[str, str]:
    given = ", ".join(["lr: 1e-3"] * (section == "optimizer") + [field])
    lines = [f"{section}: {{{given}}} #!", *more] + ["optimizer: {lr: 1e-3}"] * (section != "optimizer")
    return ("    optimizer: {lr: 1e-3}\n", "".join(f"    {line}\n" for line in lines))


@pytest.mark.parametrize(("section", "field", "code", "named"), WRONG, ids=[field for _, field, *_ in WRONG])
def test_wrong_fields(project, section, field, code, named):
    path = project.pipeline(engine(section, field), GPUS)
    project.assert_problem(path, f"engines.actor.{section}.{field.partition(':')[0]}", code, named)


@pytest.mark.parametrize(
    "field",
    [
        "recompute_modules: [mlp, core_atn]",
        "recompute_modules: [mlp, 3]",
        "moe_router_load_balancing_type: [aux_loss, seq_aux_loss]",
    ],
)
def test_wrong_entries_of_a_list(project, field):
    path = project.pipeline(engine("transformer", field))
    project.assert_problem(path, f"engines.actor.transformer.{field.partition(':')[0]}[1]", "unknown-option")


@pytest.mark.parametrize("value", ["fast", "0", "1.1", "true", "'1e-6'"])
def test_a_learning_rate_that_cannot_be(project, value):
    path = project.pipeline(("{lr: 1e-3}", f"{{lr: {value}}} #!"))
    project.assert_problem(path, "engines.actor.optimizer.lr", "invalid-value")


@pytest.mark.parametrize(
    "override",
    [
        "transformer={deallocate_pipeline_outputs: true, bf16: true}",
        "transformer={moe_router_load_balancing_type: [aux_loss, global_aux_loss], moe_aux_loss_coeff: [0.1, 0]}",
        "transformer={moe_token_dispatcher_type: allgather}",
        "optimizer={lr: 1, adam_beta1: 0, clip_grad: 0.0, weight_decay: 0, use_distributed_optimizer: true}",
        "optimizer={lr: 1e-3, optimizer: sgd, sgd_momentum: 0.8}",
        "ddp={overlap_grad_reduce: true, overlap_param_gather: true, bucket_size: 1000}",
    ],
)
def test_right_fields(project, override):
    assert check_file(project.folder / "p.yaml", [f"engines.actor.{override}"]).warnings == ()


class TestExtra:
    def test_untested_fields_are_passed_on_with_one_warning(self, project):
        extra = "extra: {transformer: {fp8_margin: 1, masked_softmax_fusion: true}, ddp: {num_buckets: 2}}"
        checked = check_file(project.pipeline(("    group: train\n", f"    group: train\n    {extra}\n")))
        (warning,) = checked.warnings
        assert (warning.place, warning.code) == ("engines.actor.extra", "untested-fields")
        assert all(field in warning.message for field in ("fp8_margin", "masked_softmax_fusion", "num_buckets"))
        actor = checked.loaded.pipeline.engines["actor"]
        assert isinstance(actor, MegatronEngineSpec)
        assert actor.transformer == {"fp8_margin": 1, "masked_softmax_fusion": True}
        assert (actor.ddp, actor.optimizer) == ({"num_buckets": 2}, {"lr": 1e-3})

    @pytest.mark.parametrize(
        ("extra", "place", "code"),
        [
            ("{transformer: {num_layers: 4}}", "extra.transformer.num_layers", "refused-key"),
            ("{optimizer: {min_lr: 0.0}}", "extra.optimizer.min_lr", "refused-key"),
            ("{ddp: {bucket_size: 1000}}", "extra.ddp.bucket_size", "tested-field"),
            ("{transformr: {fp8_margin: 1}}", "extra.transformr", "unknown-option"),
        ],
    )
    def test_fields_that_it_cannot_set(self, project, extra, place, code):
        path = project.pipeline(("    group: train\n", f"    group: train\n    extra: {extra} #!\n"))
        project.assert_problem(path, f"engines.actor.{place}", code)

    def test_it_survives_a_change_of_the_pipeline(self, project):
        override = "engines.actor.extra={transformer: {fp8_margin: 1}}"
        pipeline = check_file(project.folder / "p.yaml", [override]).loaded.pipeline
        again = type(pipeline).model_validate(pipeline.model_dump(exclude_unset=True))
        assert again == pipeline


def test_tables_name_the_parallel_sizes_and_the_number_formats():
    assert set(_PARALLEL) == set(ParallelSpec.model_fields)
    assert set(get_args(_NumberFormat)) == set(NUMBER_FORMATS)
