"""Checks of metrics that a pipeline file names. Only those of validations are known before the run."""

from __future__ import annotations

import re

from dagrl.config.errors import Place, suggest
from dagrl.config.loading.positions import Findings
from dagrl.config.schema import Pipeline
from dagrl.config.schema.val_metrics import names_at_k, vote_of

VOTE: Place = ("data", "val_vote")
_AT_K = re.compile(r"val/(?P<place>.+/)?[a-z]+@\d+")


def check_metric(pipeline: Pipeline, metric: str, place: Place, findings: Findings) -> None:
    """Report a metric that no validation of a run writes."""
    if metric.startswith("val/") and pipeline.run.validate_every is None:
        findings.error(place, f"nothing measures `{metric}`; set `run.validate_every`", "unknown-metric")
        return
    parts = _AT_K.fullmatch(metric)
    if not parts or not pipeline.rollouts:
        return
    votes, of = vote_of(pipeline) is not None, parts["place"] or ""
    kinds = {pipeline.data.val_prefixes[name]: names_at_k(n, votes=votes) for name, n in pipeline.val_ns.items()}
    # A data source may follow the prefix of the set.
    own = next((prefix for prefix in kinds if of.startswith(prefix)), None)
    places = kinds if own is None else {of: kinds[own]}
    known = [f"val/{prefix}{kind}" for prefix, of_set in places.items() for kind in of_set]
    if metric not in known:
        message = f"no validation writes `{metric}`; {suggest(metric, known)}"
        findings.error(place, message, "unknown-metric", depends_on=[("data", "val"), VOTE])
