"""The order of training prompts: its sources, its sampler, and what it learns from."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from dagrl.config.errors import removal, suggest
from dagrl.config.loading.positions import Findings
from dagrl.config.loading.prompt_files import files_of
from dagrl.config.schema import Pipeline, SourceSpec
from dagrl.config.schema.order import OrderSpec
from dagrl.model_files.nested_columns import column_type, repeated
from dagrl.plugins.isolation import ask
from dagrl.plugins.sampler import check_sampler
from dagrl.validation.data_files import fields_beside
from dagrl.validation.sampled_files import sampled

if TYPE_CHECKING:
    import pyarrow as pa


def check_order(pipeline: Pipeline, folder: Path, findings: Findings, *, with_files: bool) -> None:
    """Report wrong stages, samplers and weights; `folder` holds the user's modules."""
    data, order = pipeline.data, pipeline.data.ordering
    place = ("data", "order")
    if order.sampler is not None:
        with findings.reporting(place, "invalid-sampler"):
            ask(order.sampler, check_sampler, order.sampler, order.args, folder=folder)
    if order.by is not None and with_files:
        _check_column(pipeline, order.by, findings)
    _check_stages(pipeline, order, findings)
    if order.adaptive is not None and not pipeline.rollouts:
        message = removal("`adaptive` needs pass rates, and nothing is sampled")
        findings.error((*place, "adaptive"), message, "no-pass-rates")
    if data.weights_by == "tokens" and (len(data.sources) == 1 or order.sampler is not None):
        why = "the sampler decides alone" if order.sampler is not None else "there is one source"
        findings.warning(("data", "weights_by"), removal(f"{why}, so that weights have no effect"), "unused-weights")


def _check_column(pipeline: Pipeline, column: str, findings: Findings) -> None:
    import pyarrow as pa

    for spec in pipeline.data.sources.values():
        if spec.hub is not None:
            continue
        try:
            schema = _schema(spec)
        except (OSError, ValueError, pa.ArrowException):
            continue  # Other checks report it.
        if problem := repeated(schema, [column]):
            findings.error(("data", "order", "by"), f"{spec.title} {problem}", "unknown-column")
            return
        if column_type(schema, column) is None:
            known = [*schema.names, *fields_beside(schema, column)]
            message = f"{spec.title} has no column `{column}`; {suggest(column, known)}"
            findings.error(("data", "order", "by"), message, "unknown-column")
            return


def _schema(spec: SourceSpec) -> pa.Schema:
    """The columns of the first file that has some. It copies nothing, unlike `open_source`."""
    for file in files_of(spec):
        with sampled(file) as opened:
            if len(opened.schema):
                return opened.schema
    raise ValueError(f"{spec.title} has no columns")


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
            if name.startswith("val/") and pipeline.run.validate_every is None:
                message = f"nothing measures `{name}`; set `run.validate_every`"
                findings.error((*place, "until_metric"), message, "unknown-metric")
