"""Makes the order of a pipeline's training prompts."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import batched
from pathlib import Path

import numpy as np

from dagrl.config.schema import Pipeline
from dagrl.config.share import ALL, Share
from dagrl.data.order.mixed import MixedSources, Stage, Stages
from dagrl.data.order.order import PromptOrder
from dagrl.data.order.own import OwnSampler
from dagrl.data.order.passes import Adaptive, AdaptiveRules, Passes, RowOrder, Window, in_order, shuffled, sorted_by
from dagrl.data.order.sampler import Sampler, SourceRows
from dagrl.data.sources import Source, open_source
from dagrl.model_files.nested_columns import value_at
from dagrl.plugins.custom import load_function

_READ_ROWS = 65536


def make_order(pipeline: Pipeline, folder: Path | None, share: Share = ALL) -> PromptOrder:
    """The order of a pipeline at its start, with user modules in `folder`. Raises ValueError.

    `share`: the rows of each source to draw from; the user's own sampler ignores it.
    """
    data = pipeline.data
    opened = {name: open_source(name, spec) for name, spec in data.sources.items()}
    sources = [SourceRows(name, len(source)) for name, source in opened.items()]
    for source in sources:
        if source.rows < share.of:
            message = f"data.train: `{source.name}` has {source.rows} prompts, and there are {share.of} explorers"
            raise ValueError(f"{message}; start fewer")
    limits = (
        *(spec.max_prompt_tokens or data.max_prompt_tokens for spec in data.sources.values()),
        *(data.overlong_prompts, data.max_response_tokens, data.overlong_responses),
    )
    order = data.ordering
    return PromptOrder(
        _sampler(pipeline, sources, opened, folder, share),
        sources,
        pipeline.schedule.max_staleness,
        share=ALL if order.sampler else share,
        kind=order.sampler or ("adaptive" if order.adaptive else "by sources"),
        limits=" ".join(map(str, limits)),
    )


def _sampler(
    pipeline: Pipeline, sources: list[SourceRows], opened: Mapping[str, Source], folder: Path | None, share: Share
) -> Sampler:
    data, order = pipeline.data, pipeline.data.ordering
    # numpy's generators reject negative seeds.
    seed = pipeline.run.seed % 2**64
    if order.sampler is not None:
        return OwnSampler(load_function(order.sampler, folder), order.sampler, order.args, sources, pipeline.run.seed)
    orders = [_row_order(pipeline, opened[source.name], index, seed, share) for index, source in enumerate(sources)]
    weights = tuple(data.sources[source.name].weight for source in sources)
    stages = [
        Stage(
            tuple(stage.weights.get(source.name, 0.0) for source in sources),
            stage.until_step,
            stage.until_metric or {},
            stage.move_over,
        )
        for stage in order.stages
    ]
    return MixedSources(
        sources,
        orders,
        Stages(stages or [Stage(weights)]),
        by_tokens=data.weights_by == "tokens",
        adaptive=order.adaptive is not None,
    )


def _row_order(pipeline: Pipeline, source: Source, index: int, seed: int, share: Share) -> RowOrder:
    order, rows = pipeline.data.ordering, len(source)
    # The first source has the same seed as a single source.
    seeds = (seed, index) if index else (seed,)
    window: Window
    if order.by is not None:
        window = sorted_by(_column(source, order.by), descending=order.descending)
    elif pipeline.data.order == "file":
        window = in_order(rows)
    else:
        window = shuffled(source.group_rows, seeds, source.kept_groups)
    if order.adaptive is None:
        return Passes(rows, window, share)
    adaptive = order.adaptive
    rules = AdaptiveRules(*adaptive.band, adaptive.skip_solved_for, adaptive.priority, adaptive.floor)
    return Adaptive(rows, window, rules, (*seeds, 0), share)


def _column(source: Source, name: str) -> np.ndarray:
    """The values of a column, or of a field of a struct: numbers or texts. Raises ValueError for others."""
    column = name.partition(".")[0]
    listed: list[object] = []
    for rows in batched(range(len(source)), _READ_ROWS):
        values = source.values(rows, [name])[column]
        for row, value in zip(rows, values, strict=True):
            try:
                listed.append(value_at({column: value}, name))
            except ValueError as error:
                raise ValueError(f"{source.place(row)} has {error}; data.order.by needs it") from error
    kinds = {str if isinstance(value, str) else float if isinstance(value, int | float) else None for value in listed}
    if len(kinds) > 1 or None in kinds:
        wrong = next(
            row for row, value in enumerate(listed) if not isinstance(value, int | float | str) or len(kinds) > 1
        )
        message = (
            f"{source.place(wrong)}: data.order.by needs numbers, or texts, in `{name}`; got {listed[wrong]!r:.100}"
        )
        raise ValueError(message)
    # Not numpy's text type, which pads all texts to the longest.
    return np.array(listed, dtype=object if str in kinds else None)
