"""Fields of Megatron's configs that go together, or not: what Megatron would refuse once the ranks have started.

Single fields are `megatron_fields.py`'s.
"""

from __future__ import annotations

from dagrl.backends.backend import EngineCheck
from dagrl.backends.megatron.section import MegatronEngineSpec
from dagrl.config.errors import Place, listed, shown
from dagrl.config.loading.positions import Findings
from dagrl.config.schema import Pipeline

_DECAYS = ("adam_beta1", "adam_beta2", "sgd_momentum")
"""Fields of ``optimizer:`` that say how much of a running mean stays."""
_NOT_NEGATIVE = {
    "clip_grad": "a largest norm, such as 1.0, or 0 for none",
    "weight_decay": "0 for none",
}
"""Further ones, and what to write."""
_FOR_GPUS = {
    "transformer": ("attention_backend", "fp8", "fp4", "cpu_offloading", "fine_grained_activation_offloading"),
    "optimizer": ("use_precision_aware_optimizer", "optimizer_cpu_offload"),
}
"""Fields that are without effect, or fail, where there is no Transformer Engine."""
_OF_A_HYBRID = {
    "use_distributed_optimizer": (True, "whose parts of the weights it works on"),
    "use_precision_aware_optimizer": (True, "which leaves the float32 weights to it"),
    "optimizer": ("adam", "as the host has no other"),
    "decoupled_weight_decay": (True, "as torch's AdamW on the host has it"),
}
"""What ``optimizer_cpu_offload`` needs of other fields of ``optimizer:``, and why."""


def check_field_rules(check: EngineCheck[MegatronEngineSpec]) -> None:
    """Report combinations of fields that Megatron refuses; warn of those that were not tried with packed rows."""
    engine, place, findings = check.engine, check.place, check.findings
    _check_recompute(engine, (*place, "transformer"), findings)
    _check_ranges(engine, (*place, "optimizer"), findings)
    _check_optimizer(engine, (*place, "optimizer"), findings)
    _check_buckets(engine, (*place, "ddp"), findings)
    _check_offload(engine, place, findings)
    _check_hardware(check.pipeline, engine, place, findings)
    _warn_of_low_precision(engine, (*place, "transformer"), findings)
    if check.sizes.mixture is False:
        _warn_of_no_experts(engine, (*place, "transformer"), findings)


def _check_ranges(engine: MegatronEngineSpec, place: Place, findings: Findings) -> None:
    """Report numbers that neither Megatron nor its optimizers look at, and train wrongly with."""
    for field, value in engine.optimizer.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue  # `megatron_fields.py` says what is wrong.
        if field in _DECAYS and not 0 <= value < 1:
            findings.error(
                (*place, field), f"must be at least 0 and less than 1, got {shown(value)}; choose such as 0.9"
            )
        elif field == "adam_eps" and not 0 < value < float("inf"):
            # Of a weight without a gradient, Adam's step would be 0 / 0.
            findings.error(
                (*place, field), f"must be more than 0, got {shown(value)}; choose a small number, such as 1e-8"
            )
        elif field in _NOT_NEGATIVE and not 0 <= value < float("inf"):
            findings.error((*place, field), f"must be at least 0, got {shown(value)}; choose {_NOT_NEGATIVE[field]}")


def _check_recompute(engine: MegatronEngineSpec, place: Place, findings: Findings) -> None:
    given = engine.transformer
    granularity: Place = (*place, "recompute_granularity")
    match given.get("recompute_granularity"):
        case "full":
            needed = {"recompute_method": "uniform", "recompute_num_layers": "1"}
            if missing := [field for field in needed if given.get(field) is None]:
                added = listed(f"{field}: {needed[field]}" for field in missing)
                message = f"full recomputation needs to know {' and '.join(missing)} too; add {added}"
                findings.error(granularity, message, depends_on=[(*place, field) for field in missing])
            if given.get("moe_layer_recompute"):
                message = "full recomputation recomputes experts already; take one of the two out"
                findings.error((*place, "moe_layer_recompute"), message, depends_on=[granularity])
        case "selective" if given.get("recompute_num_layers") is not None:
            message = "selective recomputation names modules, not layers; take it out, and say `recompute_modules`"
            findings.error((*place, "recompute_num_layers"), message, depends_on=[granularity])
    if given.get("distribute_saved_activations") and engine.parallel.sequence_parallel:
        message = "sequence parallelism shares activations out already, and Megatron refuses both; take it out"
        findings.error((*place, "distribute_saved_activations"), message)


def _check_optimizer(engine: MegatronEngineSpec, place: Place, findings: Findings) -> None:
    given = engine.optimizer
    if given.get("use_precision_aware_optimizer"):
        for field, needed in (("use_distributed_optimizer", True), ("optimizer", "adam")):
            if given.get(field, needed) != needed:
                message = f"needs {field} to be {str(needed).lower()}; set it so, or take this out"
                findings.error((*place, "use_precision_aware_optimizer"), message, depends_on=[(*place, field)])
        return
    for field in ("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype"):
        if given.get(field) not in (None, "float32"):
            message = "less than float32 needs the precision-aware optimizer; add `use_precision_aware_optimizer: true`"
            findings.error((*place, field), message)


def _check_offload(engine: MegatronEngineSpec, place: Place, findings: Findings) -> None:
    """Report what Megatron's hybrid optimizer would fail with; the engine asks once more."""
    given = engine.optimizer
    if not given.get("optimizer_cpu_offload"):
        return
    where: Place = (*place, "optimizer", "optimizer_cpu_offload")
    for field, (needed, why) in _OF_A_HYBRID.items():
        if given.get(field, needed) != needed:
            message = f"needs {field} to be {shown(needed)}, {why}; set it so, or take this out"
            findings.error(where, message, depends_on=[(*place, "optimizer", field)])
    if engine.transformer.get("bf16") is False:
        message = "needs weights in bfloat16; take `bf16: false` out of `transformer`, or take this out"
        findings.error(where, message, depends_on=[(*place, "transformer", "bf16")])
    fraction = given.get("optimizer_offload_fraction", 1.0)
    if isinstance(fraction, int | float) and not isinstance(fraction, bool) and not 0 < fraction <= 1:
        message = (
            f"is the part of the optimizer on the host, and {shown(fraction)} is none; choose more than 0, at most 1"
        )
        findings.error((*place, "optimizer", "optimizer_offload_fraction"), message)


def _check_buckets(engine: MegatronEngineSpec, place: Place, findings: Findings) -> None:
    given = engine.ddp
    if given.get("num_buckets") is not None and given.get("bucket_size") is not None:
        findings.error((*place, "num_buckets"), "bucket_size says how many there are already; take one of the two out")
    size = given.get("bucket_size")
    if isinstance(size, int) and not isinstance(size, bool) and size < 1:
        findings.error((*place, "bucket_size"), f"a bucket of {size} parameters holds none; choose 1 or more")
    patterns = "param_name_patterns_for_fp32_local_accumulation"
    if given.get(patterns) and given.get("grad_reduce_in_fp32", True):
        message = "all gradients are added up in float32 already; take it out, or set grad_reduce_in_fp32 to false"
        findings.error((*place, patterns), message)


def _check_hardware(pipeline: Pipeline, engine: MegatronEngineSpec, place: Place, findings: Findings) -> None:
    group = pipeline.groups.get(engine.group or "")
    if group is None or not group.is_cpu or not group.ranks:
        return
    for section, fields in _FOR_GPUS.items():
        for field in fields:
            if getattr(engine, section).get(field):
                what = "is Transformer Engine's" if field != "optimizer_cpu_offload" else "brings states to the host"
                message = f"{what}, for GPUs, and group `{engine.group}` has CPU slots; take it out"
                findings.error((*place, section, field), message, depends_on=[("groups", str(engine.group))])


def _warn_of_low_precision(engine: MegatronEngineSpec, place: Place, findings: Findings) -> None:
    for field in ("fp8", "fp4"):
        if engine.transformer.get(field):
            message = "has not been tried with packed rows, whose number is any, and its kernels want a multiple of 16"
            findings.warning((*place, field), f"{message}; look at the first steps, or leave it out")


def _warn_of_no_experts(engine: MegatronEngineSpec, place: Place, findings: Findings) -> None:
    for field in engine.transformer:
        if field.startswith("moe_"):
            message = "has no effect, as the model has no experts; take it out"
            findings.warning((*place, field), message, depends_on=[("model",)])
