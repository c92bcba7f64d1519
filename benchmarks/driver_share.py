"""The driver's own share of a step, without Ray and in one process: who gets what, messages packed, answers noted.

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

from dagrl.config.schema import Pipeline
from dagrl.data.prompt_file import PromptRow, write_prompts
from dagrl.data.shards import shard_bounds
from dagrl.graph.op_contracts import Scope
from dagrl.orchestrator.steps.batch_index import Ledger
from dagrl.orchestrator.steps.dispatch import portion, share_out
from dagrl.scheduler.commands import Run
from dagrl.scheduler.placement import make_plan
from dagrl.scheduler.plan import Plan, PlannedTask
from dagrl.validation import check_file
from dagrl.workers.messages import Block, Effort, Span
from dagrl.workers.serialization import pack, parcel_bytes, unpack

SHAPES = [
    *(replace(BASE, generators=half, trainers=half) for half in (4, 16, 64)),
    replace(BASE, generators=64, trainers=64, prompts=1024),
    *(replace(BASE, shards=shards) for shards in (32, 128)),
    *(replace(BASE, prompts=prompts) for prompts in (512, 2048, 12800)),
]
_PORTION, _TOGETHER = 8, 2
"""Prompts that a server takes at a time, and that it tells of in one message."""
_SPAN, _EFFORT = Span(0.0, 1.0), Effort(1, None, None, None)


class Step:
    """A step as the driver sees it."""

    def __init__(self, shape: Shape, pipeline: Pipeline, plan: Plan) -> None:
        self.shape, self.pipeline, self.plan = shape, pipeline, plan
        self.nbytes = 0
        self._ledger = Ledger(shape.n, shape.shards)
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
        for shard, (begin, end) in enumerate(shard_bounds(self.shape.samples, self.shape.n, self.shape.shards)):
            positions = np.arange(begin // self.shape.n, end // self.shape.n)
            block = self._block(np.arange(begin, end), shards=(shard,), positions=positions)
            self._ledger.add_source(task.name, self._carried(block))

    def _rollout(self, task: PlannedTask) -> None:
        self._ledger.expect(task.name)
        run = Run(1, task.name, self._shards)
        for groups in batched(range(self.shape.prompts), _PORTION):
            self._carried(portion(run, task, self._ledger, self.pipeline, groups, committed=0, begun={}))
            for some in batched(groups, _TOGETHER):
                rows = self._ledger.rows_of(some)
                block = self._carried(self._block(rows, tokens=np.full(len(rows), self.shape.response_tokens)))
                self._ledger.arrived(task.name, rows)
                self._ledger.add(task.name, block)

    def _compute(self, task: PlannedTask, shards: tuple[int, ...]) -> None:
        executor, run = self.plan.executors[task.executor], Run(1, task.name, shards)
        for work in share_out(run, task, executor, self._ledger, self.pipeline, position=0, committed=0):
            for part in self._carried(work).parts:
                block = self._block(part.rows, shards=(part.index,))
                self._ledger.add(task.name, self._carried(block if task.outputs else replace(block, ref=None)))

    def _block(self, rows: np.ndarray, **fields: Any) -> Block:
        return Block(rows, ray.ObjectRef.from_random(), **{"tokens": None, "span": _SPAN, "effort": _EFFORT} | fields)

    def _carried[Message](self, message: Message) -> Message:
        """The message as the other side gets it."""
        parcel = pack(message)
        self.nbytes += parcel_bytes(*parcel)
        return unpack(*parcel)


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
