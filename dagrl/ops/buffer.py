"""``buffer``: keeps the groups of the step, and yields them with groups of earlier steps."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from dagrl.config.schema import BufferNode
from dagrl.data.batch import Batch, Column
from dagrl.data.replay_buffer import BufferFiles, Entry, admitted, chosen, kept
from dagrl.data.stats import Stat
from dagrl.model_files.fingerprint import fingerprints
from dagrl.ops.base import Context, OpInput, Output
from dagrl.ops.trajectories import first_rows, own_rows
from dagrl.ops.work import BufferWork

_IDS = ("sample_id", "group_id")
"""Columns that are written anew for returned rows."""


def buffer(parts: Sequence[OpInput], context: Context) -> Iterator[Output]:
    """Yield the step's rows unchanged, then the returned rows under new ids.

    Raises ValueError for files that are damaged, OSError on a full disk.
    """
    (part,) = parts
    node, work = context.declared(BufferNode), context.work_as(BufferWork)
    origin = context.resources.once("origin", lambda: fingerprints(context.pipeline.model))
    files = BufferFiles(context.resources.run_dir, str(work.node), origin)
    names = [name for name in work.outputs if name in part.batch]
    before = files.entries(context.step - 1)
    returned = chosen(before, node, step=context.step, seed=context.pipeline.run.seed)
    again = files.read(returned, [name for name in names if name not in _IDS])
    yield Output((), part.batch.rows, _marked(part.batch.select(names), 0.0), uncounted=tuple(names))

    groups = _groups(part.batch, names, node, context)
    new = admitted([entry for entry, _ in groups], node)
    used = {(entry.step, entry.group) for entry in returned}
    aged = [entry._replace(uses=entry.uses + ((entry.step, entry.group) in used)) for entry in before]
    after = kept([*aged, *new], node, step=context.step)
    files.write(context.step, groups, after)
    files.sweep(_needed_steps(context), context.step)

    batch = _renamed(again, part.batch, context)
    stats = {
        "buffer/rows": Stat.of([sum(entry.rows for entry in after)]),
        "buffer/bytes": Stat.of([sum(entry.nbytes for entry in after)]),
        "buffer/returned": Stat.of([len(returned)]),
        "buffer/evicted": Stat.of([len(before) + len(new) - len(after)]),
    }
    if returned:
        stats["buffer/age"] = Stat.of([context.step - 1 - entry.version for entry in returned])
        stats["buffer/uses"] = Stat.of([entry.uses + 1 for entry in returned])
    yield Output((), batch.rows, _marked(batch, 1.0), stats, uncounted=("demonstration",))


def _marked(batch: Batch, is_replayed: float) -> dict[str, Column]:
    return {**batch.columns, "is_replayed": Column(np.full(len(batch), is_replayed, dtype=np.float32))}


def _renamed(groups: Sequence[Mapping[str, Column]], like: Batch, context: Context) -> Batch:
    stride, first = context.pipeline.rows_per_prompt(), context.work_as(BufferWork).first_group
    renamed = []
    for number, columns in enumerate(groups, first):
        count = len(next(iter(columns.values())))
        rows = number * stride + np.arange(count, dtype=np.int64)
        ids = {"sample_id": rows, "group_id": np.full(count, number, dtype=np.int64)}
        given = {name: Column(values) for name, values in ids.items() if name in like}
        renamed.append(Batch(rows, {**columns, **given}))
    if not renamed:
        return like.take(np.zeros(0, dtype=np.int64))
    return Batch.concat(renamed)


def _groups(
    batch: Batch, names: Sequence[str], node: BufferNode, context: Context
) -> list[tuple[Entry, Mapping[str, Column]]]:
    if batch[node.metric].offsets is not None:
        raise ValueError(
            f"a buffer needs a metric with one number per sample, and `{node.metric}` has several; name another metric"
        )
    numbers, counts = np.unique(batch["group_id"].values, return_counts=True)
    places = np.split(np.argsort(batch["group_id"].values, kind="stable"), np.cumsum(counts)[:-1])
    kept_groups = []
    for number, mine in zip(numbers.tolist(), places, strict=True):
        group = batch.take(mine)
        values = own_rows(first_rows(group, context))[node.metric].values.astype(np.float64)
        if not len(values):
            continue
        columns = group.select(name for name in names if name not in _IDS)
        # Rounding can put equal numbers beside their mean.
        spread = np.abs(values - values.mean()).mean() if values.min() < values.max() else 0.0
        entry = Entry(
            step=context.step,
            group=number,
            file=context.step,
            place=0,
            in_file=0,
            rows=len(group),
            nbytes=sum(column.nbytes for column in columns.columns.values()),
            version=int(group["policy_version"].values.min()),
            prompt=hashlib.sha256(group["prompt_tokens"][0].tobytes()).hexdigest()[:16],
            mean=float(values.mean()),
            spread=float(spread),
            right=float((values > node.right_above).mean()),
        )
        kept_groups.append((entry, columns.columns))
    return kept_groups


def _needed_steps(context: Context) -> set[int]:
    """Steps from which the run may resume: steps with a checkpoint, steps that may still get one, and the last step."""
    committed, save_every = context.work.committed, context.pipeline.run.save_every
    folder: Path = context.resources.run_dir / "checkpoints"
    names = [path.name.rpartition("_")[2] for path in folder.glob("step_*")]
    saved = {int(name) for name in names if name.isdecimal()}
    newest = max(saved, default=0)
    due = range(newest + 1, context.step) if save_every else ()
    return {*saved, *range(committed, context.step), *(step for step in due if step % (save_every or 1) == 0)}
