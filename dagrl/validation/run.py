"""Validation, checkpoints, profiles and trackers: whether the run measures and keeps what the file asks for."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

from dagrl.config.errors import Place, counted, removal, suggest
from dagrl.config.loading.positions import Findings
from dagrl.config.schema import (
    DpoNode,
    JudgeNode,
    NodeBase,
    Pipeline,
    ProfileSpec,
    RewardModelNode,
    RewardNode,
    RolloutNode,
    SftNode,
)
from dagrl.config.schema.val_metrics import VOTES, names_at_k, vote_of
from dagrl.graph.dag import Graph
from dagrl.plugins.custom import check_call
from dagrl.plugins.isolation import ask
from dagrl.plugins.tracker import check_tracker

_VOTE: Place = ("data", "val_vote")
_METRIC: Place = ("run", "keep_best", "metric")
TRACKER_KEYS = {
    **dict.fromkeys(("wandb", "swanlab"), ("project", "entity", "group", "name")),
    "mlflow": ("project", "name"),
}
"""Settings of trackers."""
_OPTIONAL_TRACKERS = ("mlflow", "swanlab")
"""Trackers that dagrl does not install by itself."""
_SAMPLED = ("reward/mean", "reward/std", "response_tokens/mean", "response_tokens/max", "response_tokens/cut_fraction")
_GIVEN = ("demonstration_tokens/mean", "demonstration_tokens/max")
_PROMPTS = ("data/dropped_prompts", "data/cut_prompts")
_TURNS = ("turns/mean", "turns/max", "turns/out_of_turns_fraction", "turns/observation_token_fraction")
_TOOLS = ("tools/calls_per_response", "tools/failed_fraction")
_ENVIRONMENT = ("environment/reward/mean", "environment/reward/std", "environment/failed_fraction")
_AGENT = ("agent/failed_fraction", "agent/retries", "agent/requests", "agent/dropped_token_fraction", "agent/seconds")
_DPO = ("loss/dpo", "loss/sft", "dpo/chosen_reward", "dpo/rejected_reward", "dpo/margin", "dpo/accuracy")


def check_run(pipeline: Pipeline, folder: Path, findings: Findings) -> None:
    """Report wrong validations, checkpoints, profiles and trackers; `folder` holds the user's modules."""
    run = pipeline.run
    _check_validation(pipeline, findings)
    _check_vote(pipeline, folder, findings)
    _check_val_n(pipeline, findings)
    _check_checkpoints(pipeline, findings)
    for name in run.recorded.nodes if run.recorded else ():
        if name not in pipeline.nodes:
            findings.unknown(("run", "record"), "node", name, pipeline.nodes)
    if pipeline.profile is not None and not run.only_validates:
        _check_profile(pipeline, pipeline.profile, findings)
    _check_trackers(pipeline, folder, findings)


def _check_trackers(pipeline: Pipeline, folder: Path, findings: Findings) -> None:
    seen: set[str] = set()
    for index, spec in enumerate(pipeline.trackers):
        name, place = spec.tracker, ("track", index)
        own = ":" in name
        if own:
            with findings.reporting(place, "invalid-tracker"):
                ask(name, check_tracker, name, spec.args, folder=folder)
        elif name in seen:
            findings.error(place, f"`{name}` is named twice; keep one", "tracker-twice")
        elif name in _OPTIONAL_TRACKERS and find_spec(name) is None:
            message = f"{name} is not installed here, and a run continues without it; pip install 'dagrl[{name}]'"
            findings.warning(place, message, "missing-package")
        seen.add(name)
        known = ("args",) if own else TRACKER_KEYS.get(name, ())
        for key in sorted(spec.model_fields_set - {"tracker", *known}):
            findings.superfluous((*place, key), f"`{name}` has no such setting", "put it under `args`" if own else "")


def check_best_metric(pipeline: Pipeline, graph: Graph, findings: Findings) -> None:
    """Report a validation metric of ``run.keep_best`` that no validation writes."""
    best = pipeline.run.keep_best
    if best is None or not best.metric.startswith("val/") or pipeline.run.validate_every is None:
        return
    parts = re.fullmatch(r"val/(?P<place>.+/)?(?P<kind>[a-z]+@\d+)", best.metric)
    if parts is None or not pipeline.rollouts:
        known, name = [f"val/{each}" for each in _names_written(pipeline, graph.validation)], best.metric
    else:
        votes, place = vote_of(pipeline) is not None, parts["place"] or ""
        kinds = {pipeline.data.val_prefixes[name]: names_at_k(n, votes=votes) for name, n in pipeline.val_ns.items()}
        # A data source may follow the prefix of the set.
        own = next((prefix for prefix in kinds if place.startswith(prefix)), None)
        places = kinds if own is None else {place: kinds[own]}
        known = [f"val/{each}{kind}" for each, of_set in places.items() for kind in of_set]
        name = best.metric
    rewards = (node for node in pipeline.nodes.values() if isinstance(node, RewardNode))
    own_rewards = (node for node in rewards if any(":" in each.fn for each in node.functions.values()))
    # A function of the user's own names further numbers itself.
    if name not in known and not name.startswith(
        tuple(f"val/{node.written_as('reward')}_info/" for node in own_rewards)
    ):
        message = f"no validation writes `{best.metric}`; {suggest(name, known)}"
        findings.error(_METRIC, message, "unknown-metric", depends_on=[("data", "val"), _VOTE])


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
        with findings.reporting(_VOTE, "invalid-vote"):
            ask(vote, check_call, vote, "it gets the response alone", ("response",), {}, folder=folder)
    elif vote is not None and vote not in VOTES:
        message = f"there is no vote `{vote}` (write your own as `module:function`); {suggest(vote, VOTES)}"
        findings.error(_VOTE, message, "invalid-vote")


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
    homes = {engine.group for engine in pipeline.engines.values()}
    most = max((group.ranks for name, group in pipeline.groups.items() if name in homes), default=0)
    for index, rank in enumerate(profile.ranks):
        if most and rank >= most:
            message = f"no engine has more than {most} ranks, which count from 0; choose a lower one"
            findings.error(("profile", "ranks", index), message, "unknown-rank")
    for option in ("with_stack", "with_memory"):
        if getattr(profile, option) and profile.tool != "torch":
            findings.superfluous(("profile", option), "only the torch profiler records that", "set `tool: torch`")
    if profile.tool == "nsys":
        _check_gpus(pipeline, profile.nodes or on_engines, findings)


def _check_gpus(pipeline: Pipeline, nodes: Iterable[str], findings: Findings) -> None:
    for node in nodes:
        name = getattr(pipeline.nodes.get(node), "engine", None)
        engine = pipeline.engines.get(name or "")
        if engine is not None and engine.frozen_copy_of is not None:
            engine = pipeline.engines.get(engine.frozen_copy_of)
        group = pipeline.groups.get((engine and engine.group) or "")
        if group is not None and group.is_cpu:
            message = f"nsys profiles GPUs, and engine `{name}` runs on CPU slots; set `tool: torch`"
            findings.error(("profile", "tool"), message, "profile-without-gpu")
            return


def _names_written(pipeline: Pipeline, validation: Graph) -> list[str]:
    """Metrics of the nodes of a validation, without ``val/`` and without those of `names_at_k`.

    Several nodes of one kind put their name and a slash before theirs.
    """
    sampled = any(isinstance(node.spec, RolloutNode) for node in validation.nodes.values())
    names = [*_PROMPTS, *(_SAMPLED if sampled else _GIVEN)]
    for name, node in validation.nodes.items():
        own = _names_of(node.spec) if node.spec is not None else ()
        names += [*own, *(f"{name}/{each}" for each in own)]
        if isinstance(node.spec, RolloutNode):
            names += [f"{name}/response_tokens/mean", f"{name}/response_tokens/max"]
    if sampled:
        prefixes = [prefix for prefix in pipeline.data.val_prefixes.values() if prefix]
        names += [f"{prefix}response_tokens/{detail}" for prefix in prefixes for detail in ("mean", "max")]
    return names


def _names_of(node: NodeBase) -> tuple[str, ...]:
    match node:
        case RolloutNode():
            tools, environment = _TOOLS if node.has_tools else (), _ENVIRONMENT if node.environment else ()
            agent = _AGENT if node.agent else ()
            return (*_TURNS, *tools, *environment, *agent) if node.multi_turn else ()
        case RewardNode() | RewardModelNode() | JudgeNode():
            column = node.written_as("reward")
            names = [] if column == "reward" else [f"reward/{column}"]
            if isinstance(node, JudgeNode):
                names += ["judge/failed_fraction", "judge/reply_tokens"]
            elif isinstance(node, RewardModelNode):
                names.append("reward/cut_fraction")
            elif node.on_error != "stop":
                names.append("reward/failed_fraction")
            return tuple(names)
        case SftNode():
            return ("loss/sft",)
        case DpoNode():
            return _DPO
    return ()
