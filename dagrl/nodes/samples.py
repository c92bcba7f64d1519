"""``samples``, the implicit sink: writes ``samples/step_N.parquet``, so that one can read what the policy says."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pyarrow as pa
import pyarrow.parquet as pq

from dagrl.data.batch import Batch
from dagrl.data.stats import Stat
from dagrl.nodes.base import Context, Output, Part


def samples(parts: Sequence[Part], context: Context) -> Iterator[Output]:
    """Write the first rows of the step's batch, as text; yield their ids and the metrics of rewards and lengths."""
    (part,) = parts
    batch = part.batch
    limit = context.pipeline.run.samples_per_step
    if limit:
        folder = context.resources.run_dir / "samples"
        folder.mkdir(parents=True, exist_ok=True)
        name = f"step_{context.step}{'_val' if context.validation else ''}.parquet"
        aside = folder / f".{name}"
        pq.write_table(_table(batch, min(limit, len(batch)), context), aside)
        aside.replace(folder / name)
    # Here and not in the op `reward`: there may be several of those, and an op of the user's own that joins them. And
    # not in `rollout`, which may finish more prompts than the step takes.
    stats = {"reward": Stat.of(batch["reward"].values), "response_tokens": Stat.of(batch["response_tokens"].lengths)}
    if "finish_reason" in batch:
        cut = [reason == "length" for reason in batch["finish_reason"].strings()]
        stats["response_tokens/cut_fraction"] = Stat.of(cut)
    yield Output((), batch.rows, stats=stats)


def _table(batch: Batch, rows: int, context: Context) -> pa.Table:
    decode = context.resources.tokenizer.decode
    table: dict[str, list] = {"sample_id": batch.rows[:rows].tolist()}
    table["group_id"] = [int(batch["group_id"][row]) for row in range(rows)]
    table["prompt"] = [decode(batch["prompt_tokens"][row]) for row in range(rows)]
    table["response"] = [decode(batch["response_tokens"][row]) for row in range(rows)]
    table["answer"] = [bytes(batch["answer"][row]).decode() for row in range(rows)]
    table["data_source"] = [bytes(batch["data_source"][row]).decode() for row in range(rows)]
    table["reward"] = [float(batch["reward"][row]) for row in range(rows)]
    table["response_tokens"] = [batch["response_tokens"][row].tolist() for row in range(rows)]
    if "advantage" in batch:
        means = [batch["advantage"][row] for row in range(rows)]
        table["advantage"] = [float(values.mean()) if len(values) else 0.0 for values in means]
    if "policy_version" in batch:
        table["policy_version"] = [int(batch["policy_version"][row]) for row in range(rows)]
    if "finish_reason" in batch:
        table["finish_reason"] = [bytes(batch["finish_reason"][row]).decode() for row in range(rows)]
    return pa.table(table)
