"""``prompts``, the implicit source: the step's prompts, each repeated for its n samples."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from dagrl.data.batch import Batch, Column
from dagrl.data.prompts import PromptLoader
from dagrl.data.shards import shard_bounds
from dagrl.data.stats import Stat
from dagrl.nodes.base import Context, Output, Part


def prompts(parts: Sequence[Part], context: Context) -> Iterator[Output]:
    """Yield the shards of a step's batch; the first tells where the next step goes on in the data set.

    A training step takes `context.carried` first, then goes on at `context.position`; a validation takes all of its
    file.
    """
    del parts  # the source has no inputs
    loader = _loader(context)
    if context.validation:
        taken = loader.one_epoch()
    else:
        count = context.rollout.prompts_begun(context.pipeline.data.prompts_per_step)
        taken = loader.take(context.position, count, first=context.carried)
    stats = {"data/dropped_prompts": Stat.of([taken.dropped]), "data/cut_prompts": Stat.of([taken.cut])}
    facts = {} if context.validation else {"next_position": taken.next_position}
    table = _repeat(taken.columns, context.samples_per_prompt)
    for shard, (begin, end) in enumerate(shard_bounds(len(table), context.samples_per_prompt, context.shards)):
        piece = table.take(np.arange(begin, end))
        positions = None if context.validation else taken.positions[np.unique(piece["group_id"].values)]
        output = Output((shard,), piece.rows, piece.columns, positions=positions)
        yield replace(output, stats=stats, facts=facts) if shard == 0 else output


def _repeat(columns: dict[str, Column], times: int) -> Batch:
    count = len(columns["prompt_tokens"])
    groups = np.repeat(np.arange(count, dtype=np.int64), times)
    rows = np.arange(len(groups), dtype=np.int64)
    repeated = {name: column.take(groups) for name, column in columns.items()}
    return Batch(rows, {"sample_id": Column(rows), "group_id": Column(groups), **repeated})


def _loader(context: Context) -> PromptLoader:
    data, resources = context.pipeline.data, context.resources

    def open_file() -> PromptLoader:
        path = data.val if context.validation else data.train
        assert path is not None, "validation without data.val is refused when the file is checked"
        return PromptLoader(
            path,
            resources.tokenizer,
            max_prompt_tokens=data.max_prompt_tokens,
            overlong=data.overlong_prompts,
            shuffle=data.shuffle and not context.validation,
            seed=context.pipeline.run.seed,
            limit=data.val_prompts if context.validation else None,
        )

    return resources.once(f"prompts of {'val' if context.validation else 'train'}", open_file)
