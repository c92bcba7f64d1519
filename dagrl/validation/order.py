"""Checks of the order of training prompts: its sources, its sampler, and its metrics."""

from __future__ import annotations

from pathlib import Path

from dagrl.config.errors import removal
from dagrl.config.loading.positions import Findings
from dagrl.config.schema import Pipeline
from dagrl.config.schema.order import OrderSpec
from dagrl.plugins.isolation import ask
from dagrl.plugins.sampler import check_sampler
from dagrl.validation.metrics import check_metric


def check_order(pipeline: Pipeline, folder: Path, findings: Findings) -> None:
    """Report wrong stages, samplers and weights; `folder` holds the user's modules."""
    data, order = pipeline.data, pipeline.data.ordering
    place = ("data", "order")
    if order.sampler is not None:
        with findings.reporting(place, "invalid-sampler"):
            ask(order.sampler, check_sampler, order.sampler, order.args, folder=folder)
    _check_stages(pipeline, order, findings)
    if order.adaptive is not None and not pipeline.rollouts:
        message = removal("`adaptive` needs pass rates, and nothing is sampled")
        findings.error((*place, "adaptive"), message, "no-pass-rates")
    if data.weights_by == "tokens" and (len(data.sources) == 1 or order.sampler is not None):
        why = "the sampler decides alone" if order.sampler is not None else "there is one source"
        findings.warning(("data", "weights_by"), removal(f"{why}, so that weights have no effect"), "unused-weights")


def _check_stages(pipeline: Pipeline, order: OrderSpec, findings: Findings) -> None:
    sources = pipeline.data.sources
    for number, stage in enumerate(order.stages):
        place = ("data", "order", "stages", number)
        for name in stage.weights:
            if name not in sources:
                findings.unknown((*place, "weights", name), "source", name, sources)
        before = order.stages[number - 1].until_step if number else None
        if before is not None and stage.until_step is not None and stage.until_step <= before:
            message = f"the stage before ends at step {before}; give a later step, or remove one of them"
            findings.error((*place, "until_step"), message, "stage-without-steps")
        for name in stage.until_metric or {}:
            check_metric(pipeline, name, (*place, "until_metric"), findings)
