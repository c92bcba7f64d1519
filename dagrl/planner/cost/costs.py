"""Seconds of each command of a pipeline's plan: what the simulation of its schedule is driven by.

`PipelineCosts` knows the pipeline and its GPUs; what a pass, a rollout or a move takes is worked out by the modules
beside it. All of it is about what a step takes once everything has run before: nothing is compiled or connected anew.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from dagrl.backends.families.registry import engine_shape
from dagrl.backends.families.shape import ModelShape
from dagrl.backends.hf.section import HfEngineSpec
from dagrl.backends.megatron.section import MegatronEngineSpec
from dagrl.config.residency import Residency
from dagrl.config.schema import JudgeNode, LogprobNode, Pipeline, RewardModelNode, RolloutNode, TrainingNode, ValuesNode
from dagrl.graph.filtering import prompts_per_round
from dagrl.graph.offline import is_offline
from dagrl.graph.op_contracts import Scope
from dagrl.graph.rollouts import leading_rollout, rollouts
from dagrl.planner.cost import transfers
from dagrl.planner.cost.communicators import connecting_seconds, gathering_seconds
from dagrl.planner.cost.decoding import Generation, shard_ends
from dagrl.planner.cost.engines import WEIGHT_BYTES, PlannedEngine
from dagrl.planner.cost.host import node_seconds
from dagrl.planner.cost.lengths import Assumed, Lengths, lengths_of, lengths_of_demonstrations, lengths_of_judgements
from dagrl.planner.cost.passes import Batch
from dagrl.planner.cost.turns import answered_ends
from dagrl.planner.hardware import DEFAULT_GPU, GPUS_OF_MACHINE
from dagrl.scheduler.commands import Command, Commit, Restart, Run, Save, Sleep, Sync, Wake
from dagrl.scheduler.plan import HOST, Plan, PlannedTask, Rows
from dagrl.scheduler.weight_route import weight_route

_CALL_S = 5e-3
"""From a command to a worker that works, and back: Ray, and the rows that are fetched."""


@dataclass(frozen=True)
class PipelineCosts:
    """The costs of a checked pipeline's plan; see `dagrl.planner.simulation.costs.Costs`."""

    pipeline: Pipeline
    plan: Plan
    shape: ModelShape
    gpu: str = DEFAULT_GPU
    """Of groups that do not name theirs."""
    assumed: Assumed = field(default_factory=Assumed)
    """What is known of lengths."""

    def seconds(self, command: Command) -> float:
        """How long a command takes."""
        match command:
            case Run(_, task, shards):
                return self._ends(task, len(shards))[-1]
            case Sync(_, follower, source, _):
                return self._sync(follower, source)
            case Sleep(_, executor, residency) | Wake(_, executor, residency):
                return self._move(executor, residency, down=isinstance(command, Sleep))
            case Restart():
                return transfers.RESTART_S
            case Save(_, executor):
                engine = self.engines[executor]
                return transfers.save_seconds(
                    engine.weight_bytes + engine.state_bytes,
                    engine.device,
                    on_host=engine.state_bytes_on_host,
                    per_node=engine.per_node,
                    background=self.pipeline.run.async_save,
                )
            case Commit():
                return transfers.COMMIT_S
        raise AssertionError(f"no cost of {command!r}")

    def shard_offsets(self, run: Run) -> Sequence[float]:
        """When each shard of a run that streams is done, seconds after its begin, ascending."""
        return self._ends(run.task, len(run.shards))

    @cached_property
    def engines(self) -> dict[str, PlannedEngine]:
        """Executor -> what it computes with."""
        return {
            name: PlannedEngine(self.pipeline, executor, self._shape_of(name), self.gpu)
            for name, executor in self.plan.executors.items()
            if name != HOST
        }

    def _shape_of(self, engine: str) -> ModelShape:
        spec = self.pipeline.engines[engine]
        # A classifier may be of any type: it is known by the number of its parameters.
        judges = isinstance(spec, HfEngineSpec) and spec.head == "reward"
        return self.shape if judges else engine_shape(self.pipeline, engine, self.shape)

    def prompts(self, task: PlannedTask) -> int:
        """Prompts of a step on which the task works; of a round, where it runs in some."""
        data = self.pipeline.data
        if task.rows is Rows.VALIDATION:
            return (data.val_prompts or data.prompts_per_step) * len(data.val_sets)
        return prompts_per_round(self.pipeline) if task.in_rounds else data.prompts_per_step

    def rows(self, task: PlannedTask) -> int:
        """Rows of those prompts."""
        return self.prompts(task) * self.plan.group_size(task.rows)

    def lengths(self, task: PlannedTask) -> Lengths:
        """The lengths of those rows."""
        if task.sampled_by is None and is_offline(self.pipeline):
            return lengths_of_demonstrations(self.pipeline, self.assumed)
        name = task.node if task.generates else task.sampled_by or leading_rollout(self.pipeline)
        # Where steps learn from the data set's responses, nothing is known of those that are sampled in validation.
        known = replace(self.assumed, response_tokens=None) if is_offline(self.pipeline) else self.assumed
        validation = task.rows is Rows.VALIDATION
        return lengths_of(self.pipeline, rollouts(self.pipeline)[name], known, validation=validation)

    # -- runs

    @cached_property
    def _tasks(self) -> dict[str, PlannedTask]:
        return {task.name: task for task in self.plan.tasks}

    @cached_property
    def _known(self) -> dict[tuple[str, int], Sequence[float]]:
        return {}

    def _ends(self, name: str, shards: int) -> Sequence[float]:
        """When each of so many shards of a task is done; of one that does not stream, all at the same time."""
        if (name, shards) not in self._known:
            task = self._tasks[name]
            node = self.pipeline.nodes.get(task.node)
            share = shards / self.plan.shards
            ends: Sequence[float]
            match node:
                case RolloutNode():
                    ends = self._rollout(task, node, shards)
                case RewardModelNode() if isinstance(self.pipeline.engines[node.engine], HfEngineSpec):
                    ends = [self._scores(task, share)] * shards
                case JudgeNode() if node.engine:
                    ends = [self._judgements(task, node, share)] * shards
                case LogprobNode() | ValuesNode() | RewardModelNode():
                    ends = [self._pass(task, node.tokens_per_micro_batch, share)] * shards
                case TrainingNode() if task.trains:
                    ends = [self._update(task, node, share)] * shards
                case TrainingNode():
                    # Of a validation set it tells the loss.
                    ends = [self._pass(task, node.tokens_per_micro_batch, share)] * shards
                case _:
                    ends = [node_seconds(node, task.node, self.rows(task) * share, self.pipeline)] * shards
            self._known[name, shards] = [_CALL_S + end for end in ends]
        return self._known[name, shards]

    def _pass(self, task: PlannedTask, tokens_per_micro_batch: int, share: float) -> float:
        """Without gradients; row by row, of each shard by itself: its results go out together."""
        engine = self.engines[task.executor]
        cuts = 1 if task.scope is Scope.BATCH else min(self.plan.shards, self.prompts(task))
        shards = max(1, round(cuts * share))
        batch = Batch(self.rows(task) * share / shards, self.lengths(task), tokens_per_micro_batch)
        seconds = shards * engine.passes.forward(batch) + self._connecting(task) * share
        if task.frozen and engine.executor.trained:
            # The weights are there for all shards.
            swap = transfers.swap_seconds(engine.weight_bytes, engine.device)
            return seconds + swap + engine.brought_in_s
        return seconds + shards * engine.brought_in_s

    def _scores(self, task: PlannedTask, share: float) -> float:
        """Of a classifier inside its worker: matrix products, with rows as long in its tokens as in the policy's."""
        engine = self.engines[task.executor]
        tokens = self.rows(task) * share * self.lengths(task).row / engine.executor.replicas
        return 2 * engine.classifier_parameters * tokens / engine.device.matmul

    def _judgements(self, task: PlannedTask, node: JudgeNode, share: float) -> float:
        engine = self.engines[task.executor]
        rows = math.ceil(self.rows(task) * share / engine.executor.replicas)
        return shard_ends(engine.server, Generation(rows, 1, lengths_of_judgements(node, self.lengths(task))))[-1]

    def _update(self, task: PlannedTask, node: TrainingNode, share: float) -> float:
        engine = self.engines[task.executor]
        steps = node.optimizer_steps(self.pipeline.data.prompts_per_step)
        batch = Batch(self.rows(task) * node.epochs / steps, self.lengths(task), node.tokens_per_micro_batch)
        each = engine.passes.train(batch) + engine.optimizer.seconds()
        return share * (steps * each + self._connecting(task)) + engine.brought_in_s

    def _connecting(self, task: PlannedTask) -> float:
        """What a task takes longer because its ranks have slept: the first on them in a step, and the first update."""
        engine = self.engines[task.executor]
        if not self._closes_communicators(task.executor) or task.rows is not Rows.TRAIN:
            return 0.0
        tasks = [each for each in self.plan.tasks if each.executor == task.executor and each.rows is Rows.TRAIN]
        first_update = next((each for each in tasks if each.trains), None)
        return sum(
            connecting_seconds(engine.shape, engine.megatron.parallel, engine.group.ranks, updates=updates)
            for updates, first in ((False, tasks[0]), (True, first_update))
            if task is first
        )

    def _closes_communicators(self, executor: str) -> bool:
        """Whether it is a trainer on GPUs that does so in each step."""
        engine = self.engines[executor]
        return self._takes_turns(executor) and engine.device.is_gpu and not engine.megatron.keep_communicators

    def _takes_turns(self, executor: str) -> bool:
        """Whether it sleeps in each step, as others of its group have something to do then."""
        own = self.plan.executors[executor]
        working = {task.executor for task in self.plan.tasks if task.rows is Rows.TRAIN} - {executor}
        return own.sleeps and any(self.plan.executors[name].group == own.group for name in working)

    def _rollout(self, task: PlannedTask, node: RolloutNode, shards: int) -> Sequence[float]:
        engine = self.engines[task.executor]
        prompts = self.prompts(task)
        begun = node.prompts_begun(prompts) if task.rows is Rows.TRAIN else prompts
        share = shards / self.plan.shards
        work = Generation(
            prompts=math.ceil(begun * share / engine.executor.replicas),
            per_prompt=self.plan.group_size(task.rows),
            lengths=self.lengths(task),
            shards=shards,
            enough=prompts / begun,
        )
        return answered_ends(shard_ends(engine.server, work), work, node)

    # -- what moves

    def _sync(self, follower: str, source: str) -> float:
        taker, sender = self.engines[follower], self.engines[source]
        route = weight_route(self.pipeline, follower)
        device = sender.device
        seconds = transfers.sync_seconds(
            route.way,
            route.passes * sender.shape.parameters * WEIGHT_BYTES,
            device,
            link=device.peers if self._on_one_machine(sender, taker) else device.network,
            gathered=sender.lacking,
            neighbours=sender.neighbours_link,
        )
        if self._closes_communicators(source):
            seconds += gathering_seconds(sender.weight_ranks)
        return seconds + sender.brought_in_s

    @staticmethod
    def _on_one_machine(*engines: PlannedEngine) -> bool:
        """Whether their groups find room on one."""
        groups = {engine.executor.group: engine.group for engine in engines}.values()
        machine = max(GPUS_OF_MACHINE, *(group.gpus_per_node for group in groups))
        return all(group.nodes == 1 for group in groups) and sum(group.ranks for group in groups) <= machine

    def _move(self, executor: str, residency: Residency, *, down: bool) -> float:
        """Down to that residency, or up to it."""
        engine = self.engines[executor]
        ranks = engine.group.ranks
        if not isinstance(engine.spec, MegatronEngineSpec):
            if down:
                return transfers.server_sleep_seconds(engine.backed_up_bytes, engine.device, ranks=ranks)
            # Whoever follows has its weights back before the rest.
            weights = engine.served_bytes if residency is Residency.WEIGHTS or not engine.spec.weights_from else 0.0
            return transfers.server_wake_seconds(weights, engine.backed_up_bytes, engine.device)
        offload, closing = engine.spec.offload, 0 if engine.spec.keep_communicators else ranks
        weights = 0.0 if offload.param else engine.weight_bytes
        state = 0.0 if offload.optimizer else engine.state_bytes
        if not down:
            moved = weights + (state if residency is Residency.AWAKE else 0.0)
            return transfers.trainer_wake_seconds(moved, engine.device, closed=closing)
        if residency is Residency.WEIGHTS:
            return transfers.trainer_down_seconds(state, engine.device, ranks=ranks)
        # Whoever is followed on its own GPUs has left all but its weights before, for the sync.
        moved = weights + (0.0 if self._is_followed_at_home(executor) else state)
        return transfers.trainer_sleep_seconds(moved, engine.device, closing=closing)

    def _is_followed_at_home(self, name: str) -> bool:
        group = self.plan.executors[name].group
        return any(each.weights_from == name and each.group == group for each in self.plan.executors.values())
