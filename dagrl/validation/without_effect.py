"""Settings that nothing reads as the rest of the file stands: nobody would miss them, so their author should know.

They do not hinder a run, so these are warnings. Those of the schedule, of sleep and of experts are with the rules about
these.
"""

from __future__ import annotations

from dagrl.config.errors import Place, dotted, listed
from dagrl.config.loading.positions import Findings
from dagrl.config.schema import Pipeline
from dagrl.graph.rollouts import rollouts

_VALIDATION = ("val", "val_prompts", "val_pass_reward", "val_vote")


def warn_of_no_effect(pipeline: Pipeline, findings: Findings) -> None:
    """Warn of what nothing reads in groups, engines, and of what is said of validations that there are not."""
    for name, group in pipeline.groups.items():
        if group.gpu is not None and group.is_cpu:
            message = "has no effect, as the group has CPU slots; take it out"
            findings.warning(("groups", name, "gpu"), message, depends_on=[("groups", name)])
    run = pipeline.run
    if run.keep_best is not None and (run.save_every is None or run.save_every >= run.steps):
        message = "has no effect, as the last step alone is saved; set `run.save_every` below run.steps, or take it out"
        findings.warning(("run", "keep_best"), message, depends_on=[("run",)])
    _warn_of_no_validation(pipeline, findings)


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
