"""``prompts``, the implicit source: the step's prompts, each repeated for its n samples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from dagrl.config.columns import IMAGE_COLUMNS
from dagrl.config.schema import SourceSpec
from dagrl.data.batch import Batch, Column
from dagrl.data.demonstrations import ResponseColumns, in_turn
from dagrl.data.image_column import ImageColumn
from dagrl.data.prompts import PromptLoader, ReadAhead, ReadPrompts
from dagrl.data.redistribute import shard_bounds
from dagrl.data.sources import Source, open_source
from dagrl.data.stats import Stat
from dagrl.model_files.hf_config import read_config
from dagrl.model_files.images import image_settings
from dagrl.ops.base import Context, OpInput, Output
from dagrl.ops.turns.settings import rollout_tools
from dagrl.ops.work import SourceWork


def prompts(parts: Sequence[OpInput], context: Context) -> Iterator[Output]:
    """Yield the shards of a step's batch; a validation takes all prompts of its files.

    If prompts of a training step are too long, yields only their ids.
    """
    del parts  # the source has no inputs
    taken = _validation_prompts(context) if context.validation else _training_prompts(context)
    stats = {
        "data/dropped_prompts": Stat.of([len(taken.dropped)]),
        "data/cut_prompts": Stat.of([len(taken.cut)]),
    }
    work = context.work_as(SourceWork)
    if taken.dropped and not context.validation:
        yield Output((), np.zeros(0, dtype=np.int64), stats=stats, dropped=taken.dropped)
        return
    joined, sizes = taken.batch.columns, context.pipeline.group_sizes(validation=context.validation)
    times = np.array([sizes[name] for name in joined["data_set"].strings()], dtype=np.int64)
    table = _repeat(joined, times, work.first_group, max(sizes.values()))
    starts = np.concatenate([[0], np.cumsum(times)])
    for shard, (begin, end) in enumerate(shard_bounds(len(times), work.shards)):
        piece = table.take(np.arange(starts[begin], starts[end]))
        ids = None if context.validation else np.array(taken.ids[begin:end], dtype=np.int64)
        # In a rollout only a few rows use the data set's responses.
        uncounted = () if context.pipeline.is_offline else ("demonstration",)
        output = Output((shard,), piece.rows, piece.columns, prompts=ids, uncounted=uncounted)
        yield replace(output, stats=stats) if shard == 0 else output


def _training_prompts(context: Context) -> ReadPrompts:
    sources = context.pipeline.data.sources

    def loader_of(name: str) -> PromptLoader:
        return _loader(name, sources[name], context)

    reader = context.resources.once("prompts read ahead", lambda: ReadAhead(tuple(sources), loader_of))
    work = context.work_as(SourceWork)
    return reader.read(work.prompts, work.ahead)


def _validation_prompts(context: Context) -> ReadPrompts:
    sets = context.pipeline.data.val_sets
    assert sets, "validation without data.val"
    tables, dropped, cut = [], 0, 0
    for name, spec in sets.items():
        read = _loader(name, spec, context).one_epoch()
        names = Column.text([name] * len(read.rows))
        tables.append(Batch(np.arange(len(names)), {**read.columns, "data_set": names}))
        dropped, cut = dropped + len(read.dropped), cut + len(read.cut)
    return ReadPrompts((), Batch.concat(tables), tuple(range(dropped)), tuple(range(cut)))


def _repeat(columns: Mapping[str, Column], times: np.ndarray, first_group: int, group_size: int) -> Batch:
    """Repeats each prompt `times` times; see `BatchIndex` for `group_size`."""
    prompts = np.repeat(np.arange(len(times), dtype=np.int64), times)
    rows = (first_group + prompts) * group_size + np.arange(len(prompts)) - np.repeat(np.cumsum(times) - times, times)
    given = [column for name, column in columns.items() if name.startswith("responses.")]
    repeated = {
        # The samples of a prompt share its images.
        name: Column.shared(column, prompts) if name in IMAGE_COLUMNS else column.take(prompts)
        for name, column in columns.items()
        if not name.startswith("responses.")
    }
    if given:
        repeated["demonstration"] = in_turn(given, prompts)
    return Batch(rows, {"sample_id": Column(rows), "group_id": Column(first_group + prompts), **repeated})


def _responses(context: Context) -> ResponseColumns | None:
    data = context.pipeline.data
    columns = context.pipeline.response_columns(validation=context.validation)
    if not columns:
        return None
    assert data.max_response_tokens, "responses without max_response_tokens"
    return ResponseColumns(columns, data.max_response_tokens, data.overlong_responses)


def _images(source: Source, context: Context) -> ImageColumn | None:
    data = context.pipeline.data
    if data.image_key is None:
        return None
    settings = image_settings(context.pipeline.model, data)
    assert settings is not None, "a model that does not see"
    return ImageColumn(source, data.image_key, settings)


def _loader(name: str, spec: SourceSpec, context: Context) -> PromptLoader:
    data, resources = context.pipeline.data, context.resources

    def opened() -> PromptLoader:
        source = open_source(name, spec)
        return PromptLoader(
            source,
            resources.tokenizer,
            max_prompt_tokens=getattr(spec, "max_prompt_tokens", None) or data.max_prompt_tokens,
            overlong=data.overlong_prompts,
            draw=data.val_prompts if context.validation else None,
            responses=_responses(context),
            with_answers=context.pipeline.needs_answers(validation=context.validation),
            tools={name: tool.schema for name, tool in rollout_tools(context).items()},
            images=_images(source, context),
            vocab_size=read_config(context.pipeline.model).get("vocab_size"),
        )

    return resources.once(f"prompts of {'val ' if context.validation else ''}{name}", opened)
