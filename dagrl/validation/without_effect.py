"""Settings that nothing reads as the rest of the file stands: nobody would miss them, so their author should know.

They do not hinder a run, so these are warnings. Those of the schedule, of sleep and of experts are with the rules about
these.
"""

from __future__ import annotations

from collections.abc import Iterator

from dagrl.config.errors import Place, dotted, listed
from dagrl.config.loading.positions import Findings
from dagrl.config.schema import MegatronEngineSpec, Pipeline
from dagrl.graph.rollouts import rollouts
from dagrl.validation.layouts import UNEVEN_FIELDS

_RECOMPUTE = ("recompute_method", "recompute_num_layers", "recompute_modules")
_OFFLOADED = ("optimizer_offload_fraction", "overlap_cpu_optimizer_d2h_h2d", "pin_cpu_grads", "pin_cpu_params")
_OF_ADAM = ("adam_beta1", "adam_beta2", "adam_eps", "decoupled_weight_decay")
_VALIDATION = ("val", "val_prompts", "val_pass_reward", "val_vote")


def warn_of_no_effect(pipeline: Pipeline, findings: Findings) -> None:
    """Warn of what nothing reads in groups, engines, and of what is said of validations that there are not."""
    for name, group in pipeline.groups.items():
        if group.gpu is not None and group.is_cpu:
            message = "has no effect, as the group has CPU slots; take it out"
            findings.warning(("groups", name, "gpu"), message, depends_on=[("groups", name)])
    for name, engine in pipeline.engines.items():
        if isinstance(engine, MegatronEngineSpec) and engine.frozen_copy_of is None:
            for where, why in (*_unread_fields(engine), *_unread_rates(pipeline, engine)):
                place: Place = ("engines", name, *where)
                findings.warning(place, f"has no effect, {why}", depends_on=[place[:3]])
    run = pipeline.run
    if run.keep_best is not None and (run.save_every is None or run.save_every >= run.steps):
        message = "has no effect, as the last step alone is saved; set `run.save_every` below run.steps, or take it out"
        findings.warning(("run", "keep_best"), message, depends_on=[("run",)])
    _warn_of_no_validation(pipeline, findings)


def _unread_fields(engine: MegatronEngineSpec) -> Iterator[tuple[Place, str]]:
    """Fields of Megatron's configs that depend on another one, and why that turns them off."""
    transformer, optimizer = engine.transformer, engine.optimizer
    if transformer.get("recompute_granularity") is None:
        for field in _RECOMPUTE:
            if transformer.get(field) is not None:
                yield ("transformer", field), "as nothing is recomputed; add `recompute_granularity:`, or take it out"
    if engine.parallel.pipeline_model_parallel_size == 1:
        for field in UNEVEN_FIELDS:
            if transformer.get(field):
                yield ("transformer", field), "as there is one pipeline stage; take it out"
    if not optimizer.get("optimizer_cpu_offload"):
        for field in _OFFLOADED:
            if field in optimizer:
                yield (
                    ("optimizer", field),
                    "as the optimizer is on the GPU; add `optimizer_cpu_offload: true`, or take it out",
                )
    adam = optimizer.get("optimizer", "adam") == "adam"
    for field in ("sgd_momentum",) if adam else _OF_ADAM:
        if field in optimizer:
            yield ("optimizer", field), f"as the optimizer is {'adam' if adam else 'sgd'}; take it out"
    if engine.ddp.get("bucket_size") is not None and not engine.ddp.get("overlap_grad_reduce"):
        yield ("ddp", "bucket_size"), "as gradients travel at once; add `overlap_grad_reduce: true`, or take it out"


def _unread_rates(pipeline: Pipeline, engine: MegatronEngineSpec) -> Iterator[tuple[Place, str]]:
    """What a schedule of learning rates never comes to."""
    schedule, steps = engine.lr_schedule, pipeline.run.steps
    if schedule.lr_decay_style == "constant":
        for field in ("lr_decay_steps", "min_lr"):
            if field in schedule.model_fields_set:
                yield (
                    ("lr_schedule", field),
                    "as the rate stays constant; choose another `lr_decay_style`, or take it out",
                )
    elif schedule.lr_decay_steps is None and schedule.lr_warmup_steps >= steps:
        yield (
            ("lr_schedule", "lr_decay_style"),
            f"as the warm-up takes {schedule.lr_warmup_steps} steps and the run {steps} (run.steps); shorten it",
        )


def _warn_of_no_validation(pipeline: Pipeline, findings: Findings) -> None:
    run = pipeline.run
    if run.validate_every is not None and run.validate_every > run.steps:
        only = "only the one before the first step is" if run.validate_first else "none is"
        message = f"run.steps is {run.steps}, so that of all validations {only} made; lower it"
        findings.warning(("run", "validate_every"), message, depends_on=[("run", "steps")])
    if run.validates:
        if "log_val_generations" in run.model_fields_set and run.log_val_generations > run.samples_per_step:
            message = f"they are taken from run.samples_per_step, {run.samples_per_step}; raise that, or lower this"
            findings.warning(("run", "log_val_generations"), message, depends_on=[("run", "samples_per_step")])
        return
    unread: list[Place] = [("data", key) for key in _VALIDATION if key in pipeline.data.model_fields_set]
    unread += [
        ("nodes", name, key)
        for name, node in rollouts(pipeline).items()
        for key in ("val_n", "val_sampling")
        if key in node.model_fields_set
    ]
    unread += [("run", "log_val_generations")] if "log_val_generations" in run.model_fields_set else []
    if unread:
        verb = "has" if len(unread) == 1 else "have"
        message = (
            f"nothing is validated, so that {listed(map(dotted, unread))} {verb} no effect; set `run.validate_every`"
        )
        findings.warning(unread[0], message, depends_on=[("run",)])
