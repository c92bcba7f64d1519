"""The driver's own share of a step, without Ray and in one process: dispatch, serialization, batch index.

    python benchmarks/driver_share.py [--json FILE]

For the steps of `overhead`, and larger ones than a machine has room for: bytes that go through the driver for a sample,
and CPU time of dagrl's own code. What Ray takes to carry the messages comes on top.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from dataclasses import replace
from itertools import batched
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import ray
import yaml
from overhead import BASE
from timed_steps import Shape

from dagrl.config.schema import Pipeline, Scope
from dagrl.data.prompt_file import PromptRow, write_prompts
from dagrl.data.redistribute import shard_bounds
from dagrl.orchestrator.steps.batch_index import BatchIndex
from dagrl.orchestrator.steps.dispatch import dispatch, dispatch_chunk
from dagrl.scheduler.commands import Run
from dagrl.scheduler.placement import make_plan
from dagrl.scheduler.plan import Plan, PlannedTask
from dagrl.validation import check_file
from dagrl.workers.messages import Block, Usage
from dagrl.workers.serialization import deserialize, message_bytes, serialize

SHAPES = [
    *(replace(BASE, generators=half, trainers=half) for half in (4, 16, 64)),
    replace(BASE, generators=64, trainers=64, prompts=1024),
    *(replace(BASE, shards=shards) for shards in (32, 128)),
    *(replace(BASE, prompts=prompts) for prompts in (512, 2048, 12800)),
]
_PORTION, _TOGETHER = 8, 2
"""Prompts that a server takes at a time, and that it tells of in one message."""
_USAGE = Usage(1, None, None, None)


class Step:
    """A step as the driver sees it."""

    def __init__(self, shape: Shape, pipeline: Pipeline, plan: Plan) -> None:
        self.shape, self.pipeline, self.plan = shape, pipeline, plan
        self.nbytes = 0
        self._batch = BatchIndex(shape.n, shape.shards)
        self._shards = tuple(range(shape.shards))

    def play(self) -> None:
        """All tasks, one after the other."""
        for task in self.plan.tasks:
            if not task.inputs:
                self._source(task)
            elif task.generates:
                self._rollout(task)
            else:
                whole = task.scope is Scope.BATCH
                for shards in [self._shards] if whole else [(shard,) for shard in self._shards]:
                    self._compute(task, shards)

    def _source(self, task: PlannedTask) -> None:
        for shard, (begin, end) in enumerate(shard_bounds(self.shape.prompts, self.shape.shards)):
            rows = np.arange(begin * self.shape.n, end * self.shape.n)
            block = self._block(rows, shards=(shard,), prompts=np.arange(begin, end))
            self._batch.add_source(task.name, self._transferred(block))

    def _rollout(self, task: PlannedTask) -> None:
        self._batch.expect(task.name)
        run = Run(1, task.name, self._shards)
        for groups in batched(range(self.shape.prompts), _PORTION):
            self._transferred(dispatch_chunk(run, task, self._batch, self.pipeline, groups, committed=0, begun={}))
            for some in batched(groups, _TOGETHER):
                rows = self._batch.rows_of(some)
                block = self._transferred(self._block(rows, tokens=np.full(len(rows), self.shape.response_tokens)))
                self._batch.arrived(task.name, rows)
                self._batch.add(task.name, block)

    def _compute(self, task: PlannedTask, shards: tuple[int, ...]) -> None:
        executor, run = self.plan.executors[task.executor], Run(1, task.name, shards)
        for work in dispatch(run, task, executor, self._batch, self.pipeline, committed=0):
            for part in self._transferred(work).parts:
                block = self._block(part.rows, shards=(part.index,))
                self._batch.add(task.name, self._transferred(block if task.outputs else replace(block, ref=None)))

    def _block(self, rows: np.ndarray, **fields: Any) -> Block:
        return Block(
            rows, ray.ObjectRef.from_random(), **{"tokens": None, "start": 0.0, "end": 1.0, "usage": _USAGE} | fields
        )

    def _transferred[Message](self, message: Message) -> Message:
        """The message as the other side gets it."""
        data = serialize(message)
        self.nbytes += message_bytes(*data)
        return deserialize(*data)


def main() -> None:
    """Measure all shapes, three times each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the results here too")
    args = parser.parse_args()
    print(f"{'workers':>8}{'shards':>8}{'samples':>9}{'bytes a sample':>16}{'CPU ms a step':>15}{'us a sample':>13}")
    found = []
    for shape in SHAPES:
        pipeline, plan = _planned(shape)
        times = []
        for _ in range(3):
            step, begun = Step(shape, pipeline, plan), time.process_time()
            step.play()
            times.append(time.process_time() - begun)
        figures: dict[str, float] = {"workers": shape.workers, "shards": shape.shards, "samples": shape.samples}
        figures |= {"bytes_per_sample": step.nbytes / shape.samples, "cpu_ms": 1000 * min(times)}
        found.append(figures)
        sizes = "".join(f"{figures[name]:{width}}" for name, width in (("workers", 8), ("shards", 8), ("samples", 9)))
        each = 1e6 * min(times) / shape.samples
        print(f"{sizes}{figures['bytes_per_sample']:16.0f}{figures['cpu_ms']:15.1f}{each:13.1f}")
    if args.json is not None:
        args.json.write_text(json.dumps(found) + "\n")


def _planned(shape: Shape) -> tuple[Pipeline, Plan]:
    with tempfile.TemporaryDirectory(prefix="dagrl-share-") as folder:
        prompts, file = Path(folder, "prompts.parquet"), Path(folder, "pipeline.yaml")
        write_prompts(prompts, [PromptRow("benchmark", "0", "0", {"index": 0})], {"index": pa.int64()})
        file.write_text(yaml.safe_dump(shape.pipeline(str(prompts), steps=1)))
        checked = check_file(file)
    return checked.loaded.pipeline, make_plan(checked.loaded.pipeline, checked.graph)


if __name__ == "__main__":
    main()
