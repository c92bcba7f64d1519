"""Checks of validation, checkpoints, profiles and trackers: consistent intervals, metrics and files."""

from __future__ import annotations

import math
from importlib.util import find_spec
from pathlib import Path

from dagrl.config.errors import Place, counted, removal, suggest
from dagrl.config.loading.positions import Findings
from dagrl.config.schema import (
    JudgeNode,
    Pipeline,
    ProfileSpec,
    RewardModelNode,
    RewardNode,
)
from dagrl.config.schema.alarms import parse_condition
from dagrl.config.schema.val_metrics import VOTES
from dagrl.plugins.custom import check_call
from dagrl.plugins.isolation import ask
from dagrl.plugins.tracker import check_tracker
from dagrl.validation.metrics import VOTE, check_metric

_METRIC: Place = ("run", "keep_best", "metric")
_OPTIONAL_TRACKERS = ("mlflow", "swanlab")
"""Trackers whose packages dagrl does not install by default."""


def check_run(pipeline: Pipeline, folder: Path, findings: Findings) -> None:
    """Report wrong validations, checkpoints, profiles and trackers; `folder` holds the user's modules."""
    run = pipeline.run
    _check_validation(pipeline, findings)
    _check_vote(pipeline, folder, findings)
    _check_val_n(pipeline, findings)
    _check_checkpoints(pipeline, findings)
    if run.keep_best is not None and run.validate_every is not None:
        check_metric(pipeline, run.keep_best.metric, _METRIC, findings)
    if not run.only_validates:
        _check_alarms(pipeline, findings)
    for name in run.recorded.nodes if run.recorded else ():
        if name not in pipeline.nodes:
            findings.unknown(("run", "record"), "node", name, pipeline.nodes)
    if pipeline.profile is not None and not run.only_validates:
        _check_profile(pipeline, pipeline.profile, findings)
    _check_trackers(pipeline, folder, findings)


def _check_trackers(pipeline: Pipeline, folder: Path, findings: Findings) -> None:
    for index, spec in enumerate(pipeline.trackers):
        name, place = spec.tracker, ("track", index)
        if ":" in name:
            with findings.reporting(place, "invalid-tracker"):
                ask(name, check_tracker, name, spec.args, folder=folder)
        elif name in _OPTIONAL_TRACKERS and find_spec(name) is None:
            message = f"{name} is not installed here, and a run continues without it; pip install 'dagrl[{name}]'"
            findings.warning(place, message, "missing-package")


def _check_alarms(pipeline: Pipeline, findings: Findings) -> None:
    run = pipeline.run
    for key, texts in (("warn_when", run.warn_when), ("stop_when", run.stop_when)):
        for index, text in enumerate(texts):
            check_metric(pipeline, parse_condition(text).metric, ("run", key, index), findings)


def _check_validation(pipeline: Pipeline, findings: Findings) -> None:
    run, data = pipeline.run, pipeline.data
    if not run.steps and not run.validate_first and run.val_only is False:
        message = "there is nothing to do; set `run.validate_first`, or train for at least 1 step"
        findings.error(("run", "steps"), message, "no-steps")
        return
    offline = pipeline.is_offline
    scores = any(isinstance(node, RewardNode | RewardModelNode | JudgeNode) for node in pipeline.nodes.values())
    key = "validate_every" if run.validate_every else "validate_first" if run.validate_first else "val_only"
    if not run.validates:
        if data.val is not None:
            message = removal("nothing is validated", "set `run.validate_every`")
            findings.warning(("data", "val"), message, "unused-validation-set")
        for name in pipeline.rollouts if offline else ():
            message = removal("nothing is trained or validated on its samples", "set `run.validate_every`")
            findings.warning(("nodes", name), message, "unused-rollout")
        return
    if data.val is None:
        message = removal("there are no validation prompts", "add `val:` under `data`")
        findings.error(("run", key), message, "missing-validation-set")
    if offline and not scores and not pipeline.reports_val_loss:
        message = removal("a validation measures nothing", "remove `val_loss: false`, add a rollout and a reward")
        findings.error(("run", key), message, "empty-validation")
    if run.validate_every is not None and run.validate_every > run.steps and not run.only_validates:
        message = f"no step is validated, as run.steps = {run.steps}; lower it"
        findings.warning(("run", "validate_every"), message, "validated-never")


def _check_vote(pipeline: Pipeline, folder: Path, findings: Findings) -> None:
    vote = pipeline.data.val_vote
    if vote is not None and ":" in vote:
        with findings.reporting(VOTE, "invalid-vote"):
            ask(vote, check_call, vote, "it gets the response alone", ("response",), {}, folder=folder)
    elif vote is not None and vote not in VOTES:
        message = f"there is no vote `{vote}` (write your own as `module:function`); {suggest(vote, VOTES)}"
        findings.error(VOTE, message, "invalid-vote")


def _check_val_n(pipeline: Pipeline, findings: Findings) -> None:
    rollouts = pipeline.rollouts
    leading = pipeline.leading_rollout if rollouts else ""
    for name, node in rollouts.items():
        place: Place = ("nodes", name, "val_n")
        if name != leading and node.val_n not in (1, rollouts[leading].val_n):
            message = removal(f"`{leading}` samples {rollouts[leading].val_n} responses to a validation prompt")
            findings.error(place, message, "different-rows")
        if name == leading and node.val_n > 1 and (node.val_sampling is None or node.val_sampling.temperature == 0):
            message = f"{node.val_n} responses with temperature 0 are equal; add `val_sampling` with a temperature"
            findings.error(place, message, "greedy-samples")
    for key, spec in pipeline.data.val_sets.items():
        place = ("data", "val", key, "n")
        if not rollouts and (spec.n or spec.sampling):
            message = "no node samples responses to its prompts; name the file alone"
            findings.error(place[:-1], message, "option-without-effect")
        elif rollouts and (spec.n or 1) > 1 and (spec.sampling or pipeline.val_sampling(leading)).temperature == 0:
            message = f"{spec.n} responses with temperature 0 are equal; add `sampling` with a temperature"
            findings.error(place, message, "greedy-samples")


def _check_checkpoints(pipeline: Pipeline, findings: Findings) -> None:
    run, best = pipeline.run, pipeline.run.keep_best
    if best is None or run.only_validates:
        return
    if run.save_every is None or run.save_every >= run.steps:
        message = removal("only the last step is saved", "set `run.save_every` below run.steps")
        findings.warning(("run", "keep_best"), message, "nothing-to-choose-from")
    if not best.metric.startswith("val/"):
        return
    if run.validate_every is None:
        message = f"`{best.metric}` is never measured; set `run.validate_every`, or choose a metric of training"
        findings.error(_METRIC, message, "unmeasured-metric")
        return
    together = run.save_every is not None and math.lcm(run.save_every, run.validate_every) <= run.steps
    # The last step is always saved.
    if not together and run.steps % run.validate_every:
        message = f"no step is both saved and validated; set `run.save_every` to a multiple of {run.validate_every}"
        findings.error(("run", "keep_best"), message, "unmeasured-metric")


def _check_profile(pipeline: Pipeline, profile: ProfileSpec, findings: Findings) -> None:
    for index, step in enumerate(profile.steps):
        if step > pipeline.run.steps:
            message = f"the run has {counted(pipeline.run.steps, 'step')} (run.steps); name a step up to that"
            findings.error(("profile", "steps", index), message, "unknown-step")
    on_engines = [name for name, node in pipeline.nodes.items() if getattr(node, "engine", None) is not None]
    for index, name in enumerate(profile.nodes or ()):
        if name not in on_engines:
            message = f"there is no node `{name}` that runs on an engine; {suggest(name, on_engines)}"
            findings.error(("profile", "nodes", index), message, "unknown-node")
