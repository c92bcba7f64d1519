"""What is validated, how often a prompt is answered, which metric chooses the best checkpoint."""

from __future__ import annotations

import math
import re
from pathlib import Path

from dagrl.config.errors import Place, suggest
from dagrl.config.loading.positions import Findings
from dagrl.config.schema import Pipeline
from dagrl.graph.dag import Graph
from dagrl.graph.plugins.custom import check_vote_at
from dagrl.graph.plugins.isolation import ask
from dagrl.graph.rollouts import leading_rollout, rollouts
from dagrl.graph.val_metrics import VOTES, names_at_k, set_prefixes, val_n, vote_of
from dagrl.validation.val_names import names_written

_VOTE: Place = ("data", "val_vote")
_BEST: Place = ("run", "keep_best")
_METRIC: Place = (*_BEST, "metric")
_VAL: Place = ("data", "val")


def check_validation(pipeline: Pipeline, graph: Graph | None, folder: Path, findings: Findings) -> None:
    """Report what is wrong with validation; `folder` holds the user's own modules.

    `graph` is None where the columns are not sorted out yet.
    """
    run = pipeline.run
    if (run.validate_every or run.validate_first) and pipeline.data.val is None:
        key = "validate_every" if run.validate_every else "validate_first"
        message = "there are no validation prompts; add `val:` under `data`, or take this out"
        findings.error(("run", key), message, depends_on=[_VAL])
    _check_vote(pipeline, folder, findings)
    if rollouts(pipeline):
        _check_val_n(pipeline, findings)
    _check_best(pipeline, graph, findings)


def _check_vote(pipeline: Pipeline, folder: Path, findings: Findings) -> None:
    vote = pipeline.data.val_vote
    if vote is None or vote in VOTES:
        return
    if ":" not in vote:
        message = f"there is no way `{vote}` to find answers (your own is written `module:function`); "
        findings.error(_VOTE, message + suggest(vote, VOTES))
        return
    try:
        ask(vote, check_vote_at, vote, folder=folder)
    except ValueError as error:
        findings.error(_VOTE, str(error))


def _check_val_n(pipeline: Pipeline, findings: Findings) -> None:
    leading, found = leading_rollout(pipeline), rollouts(pipeline)
    for name, node in found.items():
        place: Place = ("nodes", name, "val_n")
        if name != leading and node.val_n not in (1, found[leading].val_n):
            message = (
                f"`{leading}` says how many responses a validation prompt has, {found[leading].val_n}; take this out"
            )
            findings.error(place, message, depends_on=[("nodes", leading, "val_n")])
    node, place = found[leading], ("nodes", leading, "val_n")
    if node.val_n > 1 and (node.val_sampling is None or node.val_sampling.temperature == 0):
        message = (
            f"{node.val_n} responses drawn with temperature 0 are all the same; add `val_sampling` with a temperature, "
            "or take this out"
        )
        findings.error(place, message, depends_on=[("nodes", leading, "val_sampling")])


def _check_best(pipeline: Pipeline, graph: Graph | None, findings: Findings) -> None:
    run, best = pipeline.run, pipeline.run.keep_best
    if best is None or not best.metric.startswith("val/"):
        return
    if run.validate_every is None:
        message = f"`{best.metric}` is never measured; set `run.validate_every`, or choose a metric of training"
        findings.error(_METRIC, message, depends_on=[("run", "validate_every")])
        return
    together = run.save_every is not None and math.lcm(run.save_every, run.validate_every) <= run.steps
    # The last step is always saved.
    if not together and run.steps % run.validate_every:
        message = (
            f"no step is both saved and validated, so that none is the best; set `run.save_every` to a multiple of "
            f"`validate_every`, such as {run.validate_every}"
        )
        depends: list[Place] = [("run", key) for key in ("save_every", "validate_every", "steps")]
        findings.error(_BEST, message, depends_on=depends)
    unknown = _unknown_metric(pipeline, graph, best.metric)
    if unknown is not None:
        findings.error(_METRIC, unknown, depends_on=[_VAL, _VOTE])


def _unknown_metric(pipeline: Pipeline, graph: Graph | None, metric: str) -> str | None:
    """The message for the name of a metric that no validation writes."""
    parts = re.fullmatch(r"val/(?P<place>.+/)?(?P<kind>[a-z]+@\d+)", metric)
    if parts is None or not rollouts(pipeline):
        known = [f"val/{name}" for name in names_written(pipeline, graph.validation)] if graph is not None else [metric]
        return None if metric in known else f"no validation writes `{metric}`; {suggest(metric, known)}"
    known = names_at_k(val_n(pipeline), votes=vote_of(pipeline) is not None)
    if parts["kind"] not in known:
        return f"with {val_n(pipeline)} responses to a validation prompt there is no `{parts['kind']}`; " + suggest(
            parts["kind"], known
        )
    prefixes = [prefix for prefix in set_prefixes(pipeline).values() if prefix]
    place = parts["place"] or ""
    # Behind a set's name, and behind none where the set has none, may come a data source.
    if prefixes and not any(place.startswith(prefix) for prefix in prefixes):
        names = [f"val/{prefix}{parts['kind']}" for prefix in prefixes]
        return f"each validation set has a metric of its own; choose from: {', '.join(names)}"
    return None
