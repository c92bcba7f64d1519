"""``experience``, the implicit node where a pipeline is cut: writes batches in one part, reads them in the other.

`dagrl.graph.cut` chooses the columns.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from dagrl.data.batch import Batch, Column
from dagrl.data.experience import Experience, Origin, read_experience, write_experience
from dagrl.data.redistribute import shard_bounds
from dagrl.model_files.fingerprint import model_fingerprint, tokenizer_fingerprint
from dagrl.ops.base import Context, OpInput, Output
from dagrl.ops.work import ExperienceWork


def experience(parts: Sequence[OpInput], context: Context) -> Iterator[Output]:
    """Write the step's batch, or yield the shards of a written one, with its groups in their order."""
    work = context.work_as(ExperienceWork)
    if parts:
        (part,) = parts
        _write(part.batch, context, work)
        yield Output((), part.batch.rows)
        return
    stored = read_experience(Path(work.path), work.outputs)
    stride = work.group_size
    old = stored.batch["group_id"].values
    groups, starts, group = np.unique(old, return_index=True, return_inverse=True)
    # Over-sampling and filters leave gaps in the numbers of groups.
    rows = group * stride + stored.batch.rows - old * stride
    columns = {**stored.batch.columns, "sample_id": Column(rows), "group_id": Column(group.astype(np.int64))}
    table = Batch(rows, {name: columns[name] for name in work.outputs})
    ends = [*starts.tolist(), len(rows)]
    uncounted = () if context.pipeline.is_offline else ("demonstration",)
    for shard, (begin, end) in enumerate(shard_bounds(len(groups), work.shards)):
        piece = table.take(np.arange(ends[begin], ends[end]))
        positions = stored.prompt_ids[starts[begin:end]]
        yield Output((shard,), piece.rows, piece.columns, prompts=positions, uncounted=uncounted)


def _write(batch: Batch, context: Context, work: ExperienceWork) -> None:
    batch = batch.take(np.argsort(batch.rows))
    groups = batch["group_id"].values
    places = np.searchsorted(np.unique(groups), groups)
    model = context.pipeline.model
    origin = Origin(
        model=model_fingerprint(model),
        tokenizer=tokenizer_fingerprint(model),
        explorer=work.explorer,
        step=context.step,
        group_size=work.group_size,
    )
    write_experience(Path(work.path), Experience(batch, work.prompt_ids[places]), origin)
