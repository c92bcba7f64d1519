"""Seconds of each command of a pipeline's plan, for the simulation of its schedule.

Backends estimate passes, updates, rollouts and moves of their engines; see `dagrl.backends.planning.costs`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from dagrl.backends.families.shape import ModelShape
from dagrl.backends.planning.costs import WEIGHT_BYTES, EngineCosts, PlannedBatch
from dagrl.backends.planning.decoding import Generation, Lengths, shard_ends
from dagrl.backends.planning.device_rates import DeviceRates
from dagrl.backends.planning.gpus import DEFAULT_GPU, GPUS_OF_MACHINE, gpu_of_group
from dagrl.backends.planning.planned_engine import PlannedEngine
from dagrl.backends.registry import backend_of
from dagrl.config.schema import (
    AdvantageNode,
    EngineSpec,
    JudgeNode,
    LogprobNode,
    NodeBase,
    PackingNode,
    Pipeline,
    RewardNode,
    RolloutNode,
    Scope,
    SelectiveNode,
    TrainingNode,
)
from dagrl.config.schema.engine import Transport
from dagrl.config.schema.rounds import groups_returned, prompts_per_round
from dagrl.graph.dag import PROMPTS_NODE, SAMPLES_NODE
from dagrl.planner.cost.calibration import Calibration
from dagrl.planner.cost.lengths import (
    MEAN_RESPONSE,
    Assumed,
    lengths_of,
    lengths_of_demonstrations,
    lengths_of_judgements,
)
from dagrl.scheduler.commands import Command, Commit, Restart, Run, Save, Sleep, Sync, Wake
from dagrl.scheduler.plan import Plan, PlannedTask, Rows
from dagrl.scheduler.weight_route import weight_route

_CALL_S = 5e-3
"""From a command to the worker and back: Ray, and fetching rows."""
_SYNC_S = 21e-3
"""Fixed part of a weight sync: the driver's calls and the pause of the servers (14 ms), and of their processes (7)."""
_BROADCAST_SHARE = 1.03
"""Buckets against a device's link to its peers: 9.4 ms for 3.44 GB, 51.5 ms for 16.4 GB."""
_SAME_GPU_SHARE = 0.075
"""Buckets handed over on one GPU, against its memory: tensors gathered, renamed, copied, at 284 GB/s."""
_OBJECT_STORE_BYTES_PER_S = 1e9
"""Storing buckets by a rank, and reading them by a receiver: 0.5 GB/s together."""
_OBJECT_STORE_S = 0.01
_COMMIT_S = 5e-3
"""The metrics of a step are written."""
_RESTART_S = 60.0
"""Worker, libraries and a server without prefill graphs; 1.7B takes about 30 s."""
# Nodes on CPUs: prompts, rewards, advantages, samples, and users' own.
_NODE_S = 5e-3
_ROW_S = 50e-6
"""A row is unpacked, read and packed: an order of magnitude, as the others, on one core of a server."""
_MATH_ROW_S = 1.2e-3
"""A short answer compared by math-verify: measured on one core."""
_CODE_ROW_S = 0.3
"""A program runs some tests in processes of 60 ms, measured on one core, while other programs run too."""
_REMOTE_TOKEN_S = 0.015
"""A token of a judge's reply, at an unknown server."""
_REMOTE_ROW_S = 0.2
"""Log-probs of a row, at an unknown server."""
_ADVANTAGE_ROW_S = 20e-6
_PROMPT_S = 150e-6
"""To read and tokenize a prompt."""
_SAMPLE_S = 0.5e-3
"""To decode and write a row."""


@dataclass(frozen=True)
class PipelineCosts:
    """The costs of a checked pipeline's plan; see `dagrl.planner.simulation.costs.Costs`."""

    pipeline: Pipeline
    plan: Plan
    shape: ModelShape
    gpu: str = DEFAULT_GPU
    """The GPUs of groups that name none."""
    assumed: Assumed = field(default_factory=Assumed)
    calibration: Calibration = field(default_factory=Calibration)
    """Factors from a run's own times."""

    def seconds(self, command: Command) -> float:
        return self._uncalibrated(command) * self.calibration.factor(command, self.plan)

    def _uncalibrated(self, command: Command) -> float:
        match command:
            case Run(_, task, shards):
                return self._ends(task, len(shards))[-1]
            case Sync(_, follower, source, _):
                return self._sync(follower, source)
            case Sleep(_, executor, residency):
                return self.engines[executor].sleep(residency)
            case Wake(_, executor, residency):
                return self.engines[executor].wake(residency)
            case Restart():
                return _RESTART_S
            case Save(_, executor):
                return self.engines[executor].save(background=self.pipeline.run.async_save)
            case Commit():
                return _COMMIT_S
        raise AssertionError(f"no cost of {command!r}")

    def shard_offsets(self, run: Run) -> Sequence[float]:
        """Return the ends of the shards of a run that streams, in seconds after its start, ascending."""
        factor = self.calibration.factor(run, self.plan)
        return [end * factor for end in self._ends(run.task, len(run.shards))]

    @cached_property
    def engines(self) -> dict[str, EngineCosts]:
        """Engine -> its seconds, by its backend."""
        costs = {}
        for name, executor in self.plan.executors.items():
            if executor.group is not None:
                device = gpu_of_group(self.pipeline, executor.group, self.gpu)
                engine = PlannedEngine[EngineSpec](self.pipeline, self.plan, name, self.shape, device)
                costs[name] = backend_of(engine.spec).costs(engine)
        return costs

    def prompts(self, task: PlannedTask) -> int:
        """Prompts of a step, or of a round, that the task works on."""
        data = self.pipeline.data
        if task.rows is Rows.VALIDATION:
            return (data.val_prompts or data.prompts_per_step) * len(data.val_sets)
        if task.in_rounds:
            return prompts_per_round(self.pipeline)
        returned = groups_returned(self.pipeline) if task.name in self._behind_buffer else 0
        return data.prompts_per_step + returned

    @cached_property
    def _behind_buffer(self) -> set[str]:
        """Tasks that also work on groups of earlier steps."""
        behind: set[str] = set()
        for task in self.plan.tasks:
            if task.replays or not behind.isdisjoint(task.needs):
                behind.add(task.name)
        return behind

    def rows(self, task: PlannedTask) -> int:
        """The rows of those prompts."""
        return round(self.prompts(task) * self._mean_group(task))

    def computed_rows(self, task: PlannedTask) -> int:
        """The rows that a node with ``rows`` computes, if these are known; else all rows."""
        node = self.pipeline.nodes.get(task.node)
        chosen = self.chosen_sources(node) if isinstance(node, SelectiveNode) and node.rows is not None else None
        if chosen is None:
            return self.rows(task)
        rows = {name: size * self._weights(task)[name] for name, size in self._group_sizes(task).items()}
        share = sum(rows[name] for name in rows if name in chosen) / (sum(rows.values()) or 1.0)
        return round(self.rows(task) * share)

    def chosen_sources(self, node: SelectiveNode) -> set[str] | None:
        """The sources whose rows a node with ``rows`` computes. None if its rows, or shares of sources, are unknown."""
        data = self.pipeline.data
        varying = data.weights_by == "tokens" or data.ordering.stages or data.ordering.sampler is not None
        if not isinstance(node.rows, dict) or node.rows.keys() != {"data_set"} or (varying and len(data.sources) > 1):
            return None
        return {str(name) for name in node.rows["data_set"]}

    def per_prompt(self, task: PlannedTask) -> int:
        """Rows of a prompt, rounded if sources or validation sets have different numbers."""
        return max(1, round(self._mean_group(task)))

    def _mean_group(self, task: PlannedTask) -> float:
        sizes, weights = self._group_sizes(task), self._weights(task)
        return sum(size * weights[name] for name, size in sizes.items()) / (sum(weights.values()) or 1.0)

    def _group_sizes(self, task: PlannedTask) -> dict[str, int]:
        return self.pipeline.group_sizes(validation=task.rows is Rows.VALIDATION)

    def _weights(self, task: PlannedTask) -> dict[str, float]:
        """Source, or validation set -> weight of its prompts."""
        validation, sources = task.rows is Rows.VALIDATION, self.pipeline.data.sources
        return {name: 1.0 if validation else sources[name].weight for name in self._group_sizes(task)}

    def lengths(self, task: PlannedTask) -> Lengths:
        if task.sampled_by is None and self.pipeline.is_offline:
            return lengths_of_demonstrations(self.pipeline, self.assumed)
        name = task.node if task.generates else task.sampled_by or self.pipeline.leading_rollout
        # If steps learn from the data set's responses, known lengths are not those of sampled ones in validation.
        known = replace(self.assumed, response_tokens=None) if self.pipeline.is_offline else self.assumed
        validation = task.rows is Rows.VALIDATION
        return lengths_of(self.pipeline, self.pipeline.rollouts[name], known, validation=validation)

    # -- runs

    @cached_property
    def _known(self) -> dict[tuple[str, int], Sequence[float]]:
        return {}

    def _ends(self, name: str, shards: int) -> Sequence[float]:
        """Return the ends of `shards` shards of a task; one that does not stream ends all at once."""
        if (name, shards) not in self._known:
            task = self.plan.task(name)
            node = self.pipeline.nodes.get(task.node)
            share = shards / self.plan.shards
            ends: Sequence[float]
            match node:
                case RolloutNode():
                    ends = self._rollout(task, node, shards)
                case SelectiveNode() if not self.computed_rows(task):
                    ends = [0.0] * shards
                case JudgeNode() if node.engine:
                    ends = [self._judgements(task, node, share)] * shards
                case TrainingNode() if task.trains:
                    ends = [self._update(task, node, share)] * shards
                case PackingNode() if task.engine:
                    ends = [self._pass(task, node.tokens_per_micro_batch, share)] * shards
                case _:
                    ends = [_host_seconds(node, task.node, self.computed_rows(task) * share, self.pipeline)] * shards
            self._known[name, shards] = [_CALL_S + end for end in ends]
        return self._known[name, shards]

    def _pass(self, task: PlannedTask, tokens_per_micro_batch: int, share: float) -> float:
        """Return the seconds of a pass without gradients, shard by shard."""
        engine = self.engines[task.executor]
        cuts = 1 if task.scope is Scope.BATCH else min(self.plan.shards, self.prompts(task))
        shards = max(1, round(cuts * share))
        rows, together = self.computed_rows(task) * share / shards, self.per_prompt(task)
        batch = PlannedBatch(rows, self.lengths(task), tokens_per_micro_batch, together)
        seconds = shards * engine.forward(batch) + self._reconnecting(task) * share
        if (task.frozen or task.averaged) and engine.engine.executor.trained:
            # The other weights stay for all shards.
            return seconds + engine.swap_s + engine.load_s
        return seconds + shards * engine.load_s

    def _judgements(self, task: PlannedTask, node: JudgeNode, share: float) -> float:
        engine = self.engines[task.executor]
        rows = math.ceil(self.computed_rows(task) * share / engine.engine.executor.replicas)
        return shard_ends(engine.server, Generation(rows, 1, lengths_of_judgements(node, self.lengths(task))))[-1]

    def _update(self, task: PlannedTask, node: TrainingNode, share: float) -> float:
        engine = self.engines[task.executor]
        steps = node.optimizer_steps(self.pipeline.data.prompts_per_step)
        rows, together = self.rows(task) * node.epochs / steps, self.per_prompt(task)
        batch = PlannedBatch(
            rows, self.lengths(task), node.tokens_per_micro_batch, together, node.loss_is_sum_over_tokens
        )
        # Float32 weights move once in each direction, like the swap of start weights.
        average = engine.swap_s if self.pipeline.moving_average_of(task.executor) is not None else 0.0
        return share * (steps * engine.update(batch) + self._reconnecting(task) + average) + engine.load_s

    def _reconnecting(self, task: PlannedTask) -> float:
        """Return the additional seconds of a task after a sleep, for the engine's first task in a step and its first
        update.
        """
        if not self._takes_turns(task.executor) or task.rows is not Rows.TRAIN:
            return 0.0
        tasks = [other for other in self.plan.tasks if other.executor == task.executor and other.rows is Rows.TRAIN]
        first_update = next((other for other in tasks if other.trains), None)
        return sum(
            self.engines[task.executor].reconnect_s(updates=updates)
            for updates, first in ((False, tasks[0]), (True, first_update))
            if task is first
        )

    def _takes_turns(self, executor: str) -> bool:
        """Whether it sleeps in each step, because other engines of its group work."""
        own = self.plan.executors[executor]
        working = {task.executor for task in self.plan.tasks if task.rows is Rows.TRAIN} - {executor}
        return own.sleeps and any(self.plan.executors[name].group == own.group for name in working)

    def _rollout(self, task: PlannedTask, node: RolloutNode, shards: int) -> Sequence[float]:
        engine = self.engines[task.executor]
        prompts = self.prompts(task)
        begun = node.prompts_begun(prompts) if task.rows is Rows.TRAIN else prompts
        share = shards / self.plan.shards
        work = Generation(
            prompts=math.ceil(begun * share / engine.engine.executor.replicas),
            per_prompt=self.per_prompt(task),
            lengths=self.lengths(task),
            shards=shards,
            enough=prompts / begun,
        )
        return answered_ends(shard_ends(engine.server, work), work, node)

    # -- weight syncs

    def _sync(self, follower: str, source: str) -> float:
        receiver, sender = self.engines[follower], self.engines[source]
        route = weight_route(self.pipeline, follower)
        # Linear layers in fp8 have half the bytes.
        saved = receiver.engine.shape.matrices if route.fp8 is not None else 0
        seconds = sync_seconds(
            route.way,
            route.passes * (sender.sent_parameters * WEIGHT_BYTES - saved),
            sender.device,
            link=sender.device.peers if self._on_one_machine(sender, receiver) else sender.device.network,
            gathered=sender.gathered_share,
            owned=sender.owned_share,
            neighbours=sender.gather_rate,
        )
        if self._takes_turns(source):
            seconds += sender.reconnect_to_send_s
        return seconds + sender.load_to_send_s

    @staticmethod
    def _on_one_machine(*costs: EngineCosts) -> bool:
        groups = {side.engine.executor.group: side.engine.group for side in costs}.values()
        machine = max(GPUS_OF_MACHINE, *(group.gpus_per_node for group in groups))
        return all(group.nodes == 1 for group in groups) and sum(group.ranks for group in groups) <= machine


def sync_seconds(
    way: Transport,
    weights: float,
    device: DeviceRates,
    *,
    link: float,
    gathered: float,
    owned: float,
    neighbours: float,
) -> float:
    """Return the seconds of a weight sync of `weights` bytes, with `link` bytes a second between sender and receiver.

    A rank receives a share `gathered` of the weights from its neighbours, at a rate of `neighbours`: rank 0 for a
    broadcast, each rank for `cuda_ipc`. Owners store their shares at once, the largest of which is `owned`.
    """
    if way == "object_store":
        return _OBJECT_STORE_S + (owned + 1) * weights / _OBJECT_STORE_BYTES_PER_S
    rate = device.memory * _SAME_GPU_SHARE if way == "cuda_ipc" else link * _BROADCAST_SHARE
    return _SYNC_S + weights / rate + gathered * weights / neighbours


def answered_ends(ends: Sequence[float], work: Generation, node: RolloutNode) -> Sequence[float]:
    """Return the ends of shards whose decoding alone ends at `ends`.

    A response waits for each of its answers, while the server goes on with others; a worker waits for at most
    ``tool_concurrency`` answers at a time. Faster steps with fewer responses at a time, and the prefill of answers, are
    not counted.
    """
    if not node.multi_turn or node.expected_call_s is None:
        return ends
    waits = node.expected_answers * node.expected_call_s
    in_all = work.prompts * work.per_prompt * waits / node.tool_concurrency
    return [max(end + waits, in_all * (index + 1) / len(ends)) for index, end in enumerate(ends)]


def _host_seconds(node: NodeBase | None, name: str, rows: float, pipeline: Pipeline) -> float:
    """Return the seconds of a node on `rows` rows; nodes without an entry in the file are known by `name`."""
    if name == PROMPTS_NODE:
        return _NODE_S + prompts_per_round(pipeline) * _PROMPT_S
    if name == SAMPLES_NODE:
        return _NODE_S + min(rows, pipeline.run.samples_per_step) * _SAMPLE_S
    row_s = _ROW_S
    if isinstance(node, RewardNode) and node.expected_s is not None:
        row_s = _ROW_S + node.expected_s / (node.concurrency or 1)
    elif isinstance(node, RewardNode):
        seconds = {"math": _MATH_ROW_S, "code": _CODE_ROW_S}
        shares = {name: spec.weight * pipeline.ns[name] for name, spec in pipeline.data.sources.items()}
        functions = {name: node.function_of(name) for name in shares}
        taken = {name: seconds.get(function.fn, _ROW_S) if function else 0.0 for name, function in functions.items()}
        row_s = sum(shares[name] * taken[name] for name in shares) / sum(shares.values())
    elif isinstance(node, JudgeNode):
        answer = node.sampling.max_new_tokens * MEAN_RESPONSE * _REMOTE_TOKEN_S
        row_s = (answer if node.expected_s is None else node.expected_s) / node.concurrency
    elif isinstance(node, LogprobNode):
        row_s = _REMOTE_ROW_S / node.concurrency
    elif isinstance(node, AdvantageNode):
        row_s = _ADVANTAGE_ROW_S
    return _NODE_S + rows * row_s
