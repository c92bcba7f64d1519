"""Corrections of samples: switches, criteria and their bounds."""

from __future__ import annotations

from typing import get_args

from dagrl.config.errors import Place, removal
from dagrl.config.loading.positions import Findings
from dagrl.config.schema import RatioCriterion, RolloutCorrectionSpec


def check_correction(spec: RolloutCorrectionSpec, place: Place, findings: Findings) -> None:
    """Report bounds of ``rollout_correction`` that are missing, crossed or without effect."""
    if not spec.model_fields_set:
        findings.superfluous(place, "it corrects nothing", "set `rollout_is` or `rollout_rs`")
    upper, lower = spec.rollout_is_threshold, spec.rollout_is_threshold_lower
    if spec.rollout_is is not None and lower is not None and lower >= upper:
        message = f"{lower:g} is not below rollout_is_threshold, {upper:g}; lower it"
        findings.error((*place, "rollout_is_threshold_lower"), message, "crossed-bounds")
    elif spec.rollout_is is not None and not (lower or 0) <= 1 <= upper:
        message = "tokens on which trainer and generator agree have ratio 1; choose bounds around 1"
        findings.warning((*place, "rollout_is_threshold"), message, "bounds-not-around-1")
    if spec.criteria:
        _check_rejections(spec, place, findings)


def _check_rejections(spec: RolloutCorrectionSpec, place: Place, findings: Findings) -> None:
    ratios, count = get_args(RatioCriterion), len(spec.criteria)
    if spec.rollout_rs_threshold is None:
        typical = [2.0 if criterion in ratios else 0.01 for criterion in spec.criteria]
        example = f"`rollout_rs_threshold: {typical if count > 1 else typical[0]}`"
        message = f"`{spec.criteria[0]}` has no bound; add for example {example}"
        findings.error((*place, "rollout_rs"), message, "missing-threshold")
        return
    for option in ("rollout_rs_threshold", "rollout_rs_threshold_lower"):
        given = getattr(spec, option)
        if isinstance(given, list) and len(given) != count:
            message = f"gives {len(given)} bounds for {count} criteria (rollout_rs); give one for each, in their order"
            findings.error((*place, option), message, "missing-threshold")
            return
    for rejection in spec.rejections:
        lower = 1 / rejection.upper if rejection.lower is None else rejection.lower
        if rejection.criterion not in ratios and rejection.lower is not None:
            message = f"`{rejection.criterion}` is a divergence, which is best at 0"
            message = f"{message}; write null in its place" if count > 1 else removal(message)
            findings.error((*place, "rollout_rs_threshold_lower"), message, "option-without-effect")
        elif rejection.criterion in ratios and not lower < 1 < rejection.upper:
            fact = f"`{rejection.criterion}` is best at 1, not between {lower:g} and {rejection.upper:g}"
            message = f"{fact}; choose bounds around 1"
            findings.error((*place, "rollout_rs_threshold"), message, "bounds-not-around-1")
