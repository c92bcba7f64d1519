import dataclasses

import pytest

from dagrl.backends.megatron import fields as megatron_fields
from dagrl.validation import check_file


@pytest.mark.parametrize(
    ("line", "place", "fragment"),
    [
        ("transformer: {recompute_granlarity: full}", "transformer.recompute_granlarity", "`recompute_granularity`?"),
        ("transformer: {no_such_thing_at_all_here: 1}", "transformer.no_such_thing_at_all_here", "look the name up"),
        ("ddp: {overlap_grad_reduc: true}", "ddp.overlap_grad_reduc", "did you mean `overlap_grad_reduce`?"),
        ("ddp: {overlap_grad_reduce: 1}", "ddp.overlap_grad_reduce", "expected true or false, got 1; write"),
        ("transformer: {init_method_std: small}", "transformer.init_method_std", "expected a number, got 'small'"),
        ("transformer: {recompute_granularity: ful}", "transformer.recompute_granularity", "did you mean `full`?"),
        ("transformer: {init_method: normal}", "transformer.init_method", "takes a function, which a pipeline file"),
        ("transformer: {q_lora_rank: 8}", "transformer.q_lora_rank", "follows from the model; take it out"),
        ("transformer: {cache_mla_latents: true}", "transformer.cache_mla_latents", "has no field"),
        ("transformer: {recompute_num_layers: 1.5}", "transformer.recompute_num_layers", "a whole number, got 1.5"),
        ("transformer: {recompute_modules: mlp}", "transformer.recompute_modules", "a list of names, got 'mlp'; write"),
        ("transformer: {recompute_modules: [mlp, 3]}", "transformer.recompute_modules", "a list of names, got a list"),
        ("transformer: {recompute_modules: [mlp, core_atn]}", "transformer.recompute_modules[1]", "mean `core_attn`?"),
        ("transformer: {offload_modules: [core_attn, mlp]}", "transformer.offload_modules[1]", "'mlp' is no part of a"),
        (
            "transformer: {tensor_model_parallel_size: 2}",
            "transformer.tensor_model_parallel_size",
            "is not said here; say it as `parallel.tensor_model_parallel_size` of the engine",
        ),
        ("transformer: {sequence_parallel: true}", "transformer.sequence_parallel", "`parallel.sequence_parallel`"),
    ],
)
def test_fields_are_held_against_megatron(project, line, place, fragment):
    path = project.pipeline(("    group: train\n", f"    group: train\n    {line} #!\n"))
    project.assert_problem(path, f"engines.actor.{place}", fragment)


def test_optimizer_fields_are_held_against_megatron(project):
    path = project.pipeline(("{lr: 1e-3}", "{lr: 1e-3, clip_gard: 1.0} #!"))
    project.assert_problem(path, "engines.actor.optimizer.clip_gard", "OptimizerConfig has no field", "`clip_grad`?")
    path = project.pipeline(("{lr: 1e-3}", "{lr: 1e-3, min_lr: 1e-4} #!"))
    project.assert_problem(path, "engines.actor.optimizer.min_lr", "say it as `lr_schedule.min_lr`")
    path = project.pipeline(("{lr: 1e-3}", "{lr: fast} #!"))
    project.assert_problem(path, "engines.actor.optimizer.lr", "expected a number, got 'fast'")
    aware = ("{lr: 1e-3}", "{lr: 1e-3, use_precision_aware_optimizer: true, exp_avg_dtype: bf61} #!")
    path = project.pipeline(("train: {cpus_per_node: 2}", "train: {gpus_per_node: 2}"), aware)
    project.assert_problem(path, "engines.actor.optimizer.exp_avg_dtype", "'bf61' is no number format; did", "`bf16`?")


def test_right_fields_of_base_class_and_class_pass(project):
    check_file(
        project.folder / "p.yaml",
        [
            "engines.actor.transformer={deallocate_pipeline_outputs: true, recompute_num_layers: 1, bf16: true}",
            "engines.actor.optimizer={lr: 1, clip_grad: 1.0, use_distributed_optimizer: true}",
        ],
    )


def test_models_of_latent_attention_have_fields_of_their_own(project):
    path = project.pipeline(("model_type: qwen3", "model_type: deepseek_v3"))
    check_file(path, ["engines.actor.transformer.cache_mla_latents=false"])
    problem = project.only_problem(path, "engines.actor.transformer.cache_mla_latent=false")
    assert problem.message.startswith("Megatron's MLATransformerConfig has no field `cache_mla_latent`; did you")


def test_without_megatron_only_clashes_are_told(project, monkeypatch):
    monkeypatch.setattr(megatron_fields, "megatron_fields", lambda section: None)
    path = project.folder / "p.yaml"
    check_file(path, ["engines.actor.transformer.no_such_field=1"])
    assert (
        "packs vary in length" in project.only_problem(path, "engines.actor.transformer.tp_comm_overlap=true").message
    )


def test_fields_read_as_text_are_those_that_python_sees():
    pytest.importorskip("megatron.core")
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer import MLATransformerConfig, TransformerConfig

    for section, config in (
        ("transformer", TransformerConfig),
        ("latent attention", MLATransformerConfig),
        ("optimizer", OptimizerConfig),
        ("ddp", DistributedDataParallelConfig),
    ):
        assert set(megatron_fields.megatron_fields(section)) == {field.name for field in dataclasses.fields(config)}


def test_the_names_of_an_enumeration_are_known(project):
    gpus = ("train: {cpus_per_node: 2}", "train: {gpus_per_node: 2}")
    path = project.pipeline(
        gpus, ("    group: train\n", "    group: train\n    transformer: {attention_backend: flahs} #!\n")
    )
    project.assert_problem(path, "engines.actor.transformer.attention_backend", "'flahs' is not known", "`flash`?")
    check_file(project.pipeline(gpus), ["engines.actor.transformer.attention_backend=fused"])
