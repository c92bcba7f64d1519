"""A lower bound of a step: its work at the data sheet's rates of all GPUs, with nothing idle.

    bound   = max(chain, overlap, host)
    chain   = the longest path through nodes that sample, or train on the whole step, each taking
              max(operations / F, bytes / B); for synchronous training, in which nodes run one after the other
    overlap = max(all operations / F, all bytes / B): everything at once
    host    = seconds of the nodes without an engine / run.host_workers

F and B are the operations (bfloat16, dense) and bytes a second of all GPUs together; in fp8, linear layers have fewer
operations by the data sheet's gain, and weights of one byte. Operations are the model's own, without recomputation and
padding (`dagrl.backends.families.flops`). Bytes are the reads of decoding: the weights that one token uses, for each
token of the longest response, and keys and values. Everything else takes no time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from dagrl.backends.families.flops import ModelFlops, model_flops
from dagrl.backends.planning.decoding import Lengths, Server
from dagrl.backends.planning.gpus import Gpu
from dagrl.config.schema import JudgeNode, LogprobNode, TrainingNode
from dagrl.planner.cost.costs import PipelineCosts
from dagrl.planner.cost.lengths import lengths_of_judgements
from dagrl.scheduler.commands import Run
from dagrl.scheduler.plan import HOST, PlannedTask, Rows

_BYTES = 2


@dataclass(frozen=True, slots=True)
class StepBound:
    """The lower bound of a step on these GPUs, for any layout."""

    seconds: float
    by: str
    """``chain``, ``overlap`` or ``host``."""


class _Work(NamedTuple):
    operations: float
    read: float
    """Bytes."""


def step_bound(costs: PipelineCosts, gpus: Sequence[Gpu]) -> StepBound:
    """Bound a step of the costs' plan on `gpus`, one entry for each."""
    plan = costs.plan
    peak, memory = sum(gpu.tflops * 1e12 for gpu in gpus), sum(gpu.memory_gb_per_s * 1e9 for gpu in gpus)
    tasks = [task for task in plan.tasks if task.rows is Rows.TRAIN]
    work = {task.name: _work(costs, task) for task in tasks if task.executor != HOST}
    operations, read = (sum(own_work[kind] for own_work in work.values()) for kind in (0, 1))
    bounds = {"overlap": max(operations / peak, read / memory), "host": _host_seconds(costs, tasks)}
    if not plan.max_staleness:
        ends: dict[str, float] = {}
        for task in tasks:
            own = work.get(task.name, _Work(0.0, 0.0))
            takes = _share_in_chain(task) * max(own.operations / peak, own.read / memory)
            ends[task.name] = takes + max((ends.get(name, 0.0) for name in plan.waits_for(task)), default=0.0)
        bounds["chain"] = max(ends.values())
    by = max(bounds, key=bounds.__getitem__)
    return StepBound(bounds[by], by)


def _share_in_chain(task: PlannedTask) -> float:
    """The share of a task that cannot overlap with other tasks of the chain: the last piece of an update in pieces."""
    if task.trains:
        return 1 / max(1, len(task.pieces))
    return 1.0 if task.generates else 0.0


def _work(costs: PipelineCosts, task: PlannedTask) -> _Work:
    node, engine = costs.pipeline.nodes.get(task.node), costs.engines[task.executor]
    flops, lengths = model_flops(engine.engine.shape), costs.lengths(task)
    rows = costs.computed_rows(task) * costs.plan.rounds_of(task)
    if not rows:
        return _Work(0.0, 0.0)
    if isinstance(node, JudgeNode):
        return _generation(flops, engine.server, lengths_of_judgements(node, lengths), rows, 1)
    if task.generates:
        return _generation(flops, engine.server, lengths, rows, costs.per_prompt(task))
    gain = engine.device.fp8_gain if engine.multiplies_in_fp8 else 1.0
    # Heads of values and scores have next to no operations.
    head = flops.per_prediction if isinstance(node, LogprobNode | TrainingNode) else 0
    row = flops.per_token / gain * lengths.row + flops.per_pair * lengths.mean_square / 2 + head * lengths.response
    passes = 1
    if isinstance(node, TrainingNode) and task.trains:
        passes = node.epochs * engine.passes_of_update
    return _Work(passes * rows * row, 0.0)


def _generation(flops: ModelFlops, server: Server, lengths: Lengths, rows: int, per_prompt: int) -> _Work:
    """Each prompt is prefilled once; responses to it read its keys and values together."""
    shape, per_token = server.shape, flops.per_token / (server.device.fp8_gain if server.fp8 else 1.0)
    prompt, response = lengths.prompt, lengths.response
    squares = lengths.mean_square - prompt**2 - 2 * prompt * response
    prefill = rows / per_prompt * (per_token * prompt + flops.per_pair * prompt**2 / 2)
    decoded = (per_token + flops.per_prediction) * response + flops.per_pair * (prompt * response + squares / 2)
    longest = lengths.quantile(1 - 0.5 / max(1, rows))
    weights = longest * (shape.active_parameters - (0 if shape.tied else shape.embedding)) * _BYTES
    if server.fp8:
        # Two operations for each weight of a linear layer, which has one byte less.
        weights -= longest * flops.per_token / 2
    cached = rows * (prompt * response / per_prompt + squares / 2) * shape.cache_values_per_token * shape.layers
    return _Work(prefill + rows * decoded, weights + cached * server.cache_bytes)


def _host_seconds(costs: PipelineCosts, tasks: Iterable[PlannedTask]) -> float:
    whole = tuple(range(costs.plan.shards))
    on_host = (task for task in tasks if task.executor == HOST)
    seconds = sum(costs.seconds(Run(1, task.name, whole)) * costs.plan.rounds_of(task) for task in on_host)
    return seconds / costs.plan.executors[HOST].ranks
