import pytest

from dagrl.validation import check_file

GPUS = ("train: {cpus_per_node: 2}", "train: {gpus_per_node: 2}")
MOE = ("model_type: qwen3", "model_type: qwen3_moe")


@pytest.mark.parametrize(
    ("line", "place", "fragment"),
    [
        (
            "transformer: {recompute_granularity: full, recompute_method: uniform}",
            "transformer.recompute_granularity",
            "needs to know recompute_num_layers too; add `recompute_num_layers: 1`",
        ),
        (
            "transformer: {recompute_granularity: full, recompute_num_layers: 1}",
            "transformer.recompute_granularity",
            "needs to know recompute_method too; add `recompute_method: uniform`",
        ),
        (
            "transformer: {recompute_granularity: selective, recompute_num_layers: 1}",
            "transformer.recompute_num_layers",
            "names modules, not layers; take it out",
        ),
        (
            "parallel: {tensor_model_parallel_size: 2, sequence_parallel: true}\n"
            "    transformer: {distribute_saved_activations: true}",
            "transformer.distribute_saved_activations",
            "Megatron refuses both",
        ),
        ("ddp: {num_buckets: 2, bucket_size: 100}", "ddp.num_buckets", "take one of the two out"),
        (
            "ddp: {param_name_patterns_for_fp32_local_accumulation: [all]}",
            "ddp.param_name_patterns_for_fp32_local_accumulation",
            "set grad_reduce_in_fp32 to false",
        ),
    ],
)
def test_fields_that_megatron_takes_only_together_or_apart(project, line, place, fragment):
    path = project.pipeline(("    group: train\n", f"    group: train\n    {line} #!\n"))
    project.assert_problem(path, f"engines.actor.{place}", fragment)


@pytest.mark.parametrize(
    ("fields", "place", "fragment"),
    [
        ("exp_avg_dtype: bfloat16", "exp_avg_dtype", "add `use_precision_aware_optimizer: true`"),
        (
            "use_precision_aware_optimizer: true, optimizer: sgd",
            "use_precision_aware_optimizer",
            "needs optimizer to be adam",
        ),
        (
            "use_precision_aware_optimizer: true, use_distributed_optimizer: false",
            "use_precision_aware_optimizer",
            "needs use_distributed_optimizer to be true",
        ),
    ],
)
def test_optimizer_states_of_less_than_float32(project, fields, place, fragment):
    path = project.pipeline(GPUS, ("{lr: 1e-3}", f"{{lr: 1e-3, {fields}}} #!"))
    project.assert_problem(path, f"engines.actor.optimizer.{place}", fragment)


def test_combinations_that_megatron_takes_pass(project):
    recompute = "{recompute_granularity: full, recompute_method: uniform, recompute_num_layers: 1}"
    optimizer = "{lr: 1e-3, use_precision_aware_optimizer: true, exp_avg_dtype: bfloat16}"
    overrides = [f"engines.actor.transformer={recompute}", f"engines.actor.optimizer={optimizer}"]
    assert check_file(project.pipeline(GPUS), overrides).warnings == ()


def test_what_nobody_has_tried_is_a_warning(project):
    path = project.pipeline(GPUS)
    (warning,) = check_file(path, ["engines.actor.transformer.fp8=hybrid"]).warnings
    assert warning.message.startswith("has not been tried with packed rows")


def test_fields_of_experts_warn_in_a_model_without_any(project):
    override = "engines.actor.transformer.moe_aux_loss_coeff=0.01"
    (warning,) = check_file(project.pipeline(), [override]).warnings
    assert warning.message == "has no effect, as the model has no experts; take it out"
    assert check_file(project.pipeline(MOE), [override]).warnings == ()


@pytest.mark.parametrize(
    ("field", "value", "fragment"),
    [
        ("adam_beta1", "1", "must be at least 0 and less than 1, got 1; choose such as 0.9"),
        ("adam_beta2", "2.0", "less than 1, got 2"),
        ("sgd_momentum", "-0.1", "less than 1, got -0.1"),
        ("adam_eps", "0", "must be more than 0, got 0; choose a small number, such as 1e-8"),
        ("adam_eps", "-1e-8", "must be more than 0, got -1e-08"),
        ("clip_grad", "-1.0", "must be at least 0, got -1.0; choose a largest norm, such as 1.0, or 0 for none"),
        ("weight_decay", ".nan", "must be at least 0, got nan; choose 0 for none"),
    ],
)
def test_numbers_that_no_optimizer_can_train_with(project, field, value, fragment):
    path = project.pipeline(("{lr: 1e-3}", f"{{lr: 1e-3, {field}: {value}}} #!"))
    project.assert_problem(path, f"engines.actor.optimizer.{field}", fragment)


def test_the_bounds_of_an_optimizers_numbers_may_be_taken(project):
    check_file(project.pipeline(("{lr: 1e-3}", "{lr: 1e-3, adam_beta1: 0, clip_grad: 0.0, weight_decay: 0}")))


@pytest.mark.parametrize("field", ["fp8: e4m3", "cpu_offloading: true", "attention_backend: flash"])
def test_what_only_transformer_engine_has_needs_gpus(project, field):
    line = ("    group: train\n", f"    group: train\n    transformer: {{{field}}} #!\n")
    place = f"engines.actor.transformer.{field.partition(':')[0]}"
    project.assert_problem(project.pipeline(line), place, "for GPUs, and group `train` has CPU slots; take it out")
    check_file(project.pipeline(line, ("train: {cpus_per_node: 2}", "train: {gpus_per_node: 2}")))


def test_full_recomputation_that_says_no_more_is_one_problem(project):
    path = project.pipeline(
        ("    group: train\n", "    group: train\n    transformer: {recompute_granularity: full} #!\n")
    )
    project.assert_problem(
        path,
        "engines.actor.transformer.recompute_granularity",
        "needs to know recompute_method and recompute_num_layers too; add `recompute_method: uniform` and "
        "`recompute_num_layers: 1`",
    )


def test_a_bucket_that_holds_nothing(project):
    path = project.pipeline(
        ("    group: train\n", "    group: train\n    ddp: {overlap_grad_reduce: true, bucket_size: -1} #!\n")
    )
    project.assert_problem(path, "engines.actor.ddp.bucket_size", "a bucket of -1 parameters holds none; choose 1")


@pytest.mark.parametrize(
    ("said", "field", "fragment"),
    [
        ("use_distributed_optimizer: false", "", "needs use_distributed_optimizer to be true, whose parts"),
        ("use_precision_aware_optimizer: false", "", "needs use_precision_aware_optimizer to be true"),
        ("optimizer: sgd", "", "needs optimizer to be 'adam', as the host has no other"),
        ("decoupled_weight_decay: false", "", "needs decoupled_weight_decay to be true"),
        ("optimizer_offload_fraction: 0", "optimizer_offload_fraction", "0 is none; choose more than 0, at most 1"),
        ("optimizer_offload_fraction: 1.5", "optimizer_offload_fraction", "1.5 is none"),
    ],
)
def test_what_an_optimizer_on_the_host_cannot_do(project, said, field, fragment):
    optimizer = f"optimizer: {{lr: 1e-3, optimizer_cpu_offload: true, {said}}} #!"
    path = project.pipeline(GPUS, ("optimizer: {lr: 1e-3}", optimizer))
    project.assert_problem(path, f"engines.actor.optimizer.{field or 'optimizer_cpu_offload'}", fragment)


@pytest.mark.parametrize("field", ["optimizer_cpu_offload", "use_precision_aware_optimizer"])
def test_optimizers_that_need_gpus(project, field):
    path = project.pipeline(("optimizer: {lr: 1e-3}", f"optimizer: {{lr: 1e-3, {field}: true}} #!"))
    project.assert_problem(path, f"engines.actor.optimizer.{field}", "group `train` has CPU slots; take it out")
