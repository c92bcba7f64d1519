"""Options of ``rollout_correction`` that go together, or not."""

from __future__ import annotations

from typing import get_args

from dagrl.config.errors import Place, listed
from dagrl.config.loading.positions import Findings
from dagrl.config.schema import Pipeline, RatioCriterion, RolloutCorrectionSpec, UpdateNode
from dagrl.graph.dag import Graph

_OF_WEIGHTS = ("rollout_is_threshold", "rollout_is_threshold_lower", "rollout_is_batch_normalize")
_OF_REJECTION = ("rollout_rs_threshold", "rollout_rs_threshold_lower")
_SWITCHES = ("rollout_is", "rollout_rs", "rollout_token_veto_threshold")


def check_rollout_correction(pipeline: Pipeline, graph: Graph | None, findings: Findings) -> None:
    """Report options without effect, missing or crossed bounds, and weights that need what is not there."""
    for name, node in pipeline.nodes.items():
        if not isinstance(node, UpdateNode) or node.rollout_correction is None:
            continue
        place: Place = ("nodes", name, "rollout_correction")
        _check_switches(node.rollout_correction, place, findings)
        _check_weights(node.rollout_correction, place, findings)
        _check_rejection(node.rollout_correction, place, findings)
        if graph is not None:
            has_old = "old_logprob" in graph.nodes[name].inputs and not node.takes_rollout_for_old
            several = node.optimizer_steps(pipeline.data.prompts_per_step) > 1
            _check_old(node, node.rollout_correction, place, findings, has_old=has_old, several=several)


def _check_switches(spec: RolloutCorrectionSpec, place: Place, findings: Findings) -> None:
    if all(getattr(spec, switch) is None for switch in _SWITCHES):
        findings.error(place, f"it corrects nothing; set one of {listed(_SWITCHES)}, or take it out")
        return
    for switch, options in (("rollout_is", _OF_WEIGHTS), ("rollout_rs", _OF_REJECTION)):
        for option in options:
            if getattr(spec, switch) is None and option in spec.model_fields_set and getattr(spec, option) is not None:
                findings.error((*place, option), f"has no effect without {switch}; set that, or take this out")


def _check_weights(spec: RolloutCorrectionSpec, place: Place, findings: Findings) -> None:
    if spec.rollout_is is None:
        return
    upper, lower = spec.rollout_is_threshold, spec.rollout_is_threshold_lower
    if lower is not None and lower >= upper:
        message = f"{lower:g} is not below rollout_is_threshold, {upper:g}, so that nothing is left; lower it"
        findings.error((*place, "rollout_is_threshold_lower"), message)
    elif not (lower or 0) <= 1 <= upper:
        message = "weighs tokens down on which trainer and generator agree, whose ratio is 1"
        remedy = "choose bounds on both sides of 1" if lower else "choose 1 or more"
        findings.warning((*place, "rollout_is_threshold"), f"{message}; {remedy}")


def _check_rejection(spec: RolloutCorrectionSpec, place: Place, findings: Findings) -> None:
    upper, lower = spec.rollout_rs_threshold, spec.rollout_rs_threshold_lower
    if spec.rollout_rs is None:
        return
    of_ratios = spec.rollout_rs in get_args(RatioCriterion)
    if upper is None:
        example = "2.0" if of_ratios else "0.01"
        message = f"`{spec.rollout_rs}` has no bound; add a threshold, such as `rollout_rs_threshold: {example}`"
        findings.error((*place, "rollout_rs"), message)
    elif lower is not None and not of_ratios:
        message = f"`{spec.rollout_rs}` is a divergence, which is best at 0; take the lower bound out"
        findings.error((*place, "rollout_rs_threshold_lower"), message)
    elif of_ratios and not (1 / upper if lower is None else lower) < 1 < upper:
        bounds = f"{1 / upper if lower is None else lower:g} and {upper:g}"
        message = (
            f"ratios between {bounds} would stay, and those of 1, where trainer and generator agree, would not; choose "
            "bounds on both sides of 1"
        )
        findings.error((*place, "rollout_rs_threshold"), message)


def _check_old(
    node: UpdateNode, spec: RolloutCorrectionSpec, place: Place, findings: Findings, *, has_old: bool, several: bool
) -> None:
    """`has_old`: whether the trainer's log-probs from before the update are there; `several`: optimizer steps."""
    if spec.rollout_is is None:
        return
    if spec.rollout_is_batch_normalize and not has_old:
        message = (
            "the mean of all weights must be known before the first micro-batch is; add a node "
            f"`{{op: logprob, engine: {node.engine}, write: old_logprob}}`, or take this out"
        )
        findings.error((*place, "rollout_is_batch_normalize"), message)
    if node.loss.policy == "reinforce" and has_old and several:
        message = (
            "weighs by the log-probs from before the first optimizer step, so that the later ones are not accounted "
            "for; take the node of the old log-probs out: then weights are of the current ones"
        )
        findings.warning((*place, "rollout_is"), message)
