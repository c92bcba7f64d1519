"""An engine of a plan on its group, and its largest work from the nodes of a pipeline."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import cast

from dagrl.backends.families.registry import engine_shape
from dagrl.backends.families.shape import ModelShape
from dagrl.backends.planning.device_rates import DeviceRates, rates_of
from dagrl.backends.planning.gpus import Gpu
from dagrl.config.schema import EngineSpec, GroupSpec, JudgeNode, LogprobNode, PackingNode, Pipeline, TrainingNode
from dagrl.config.schema.rounds import groups_returned
from dagrl.scheduler.plan import Executor, Plan
from dagrl.scheduler.weight_route import weight_route


@dataclass(frozen=True, slots=True)
class Workload:
    """The largest work of an engine."""

    update_tokens: int = 0
    """Tokens of an update's micro-batch; 0 if the engine is not trained."""
    logprob_tokens: int = 0
    """Tokens of a micro-batch of log-probs, values or scores."""
    micro_batches: int = 1_000_000
    """Most micro-batches of one update: with fewer than pipeline stages, stages stay idle."""
    sums_over_tokens: bool = False
    """Whether the losses of updates are sums over tokens."""
    prompt_tokens: int = 0
    """Tokens of the longest prompt in these micro-batches; the next two fields also refer to them."""
    row_tokens: int = 0
    """Tokens of the longest prompt and response."""
    rows_per_prompt: int = 1
    longest: int = 0
    """Tokens of the longest prompt and response that it generates."""
    bucket_bytes: int = 0
    """Size of a bucket of weights that it sends or receives; 0 without syncs."""
    keeps_start_weights: bool = False
    """Whether another engine is its frozen copy."""
    keeps_average: bool = False
    """Whether another engine is the moving average of its weights."""
    teacher_width: int = 0
    """Width of the teacher whose output layer it holds; 0 without one."""
    sleeps: bool = False
    saves_in_background: bool = False
    keeps_weights: bool = False
    """Whether it keeps its weights in a sleep, because no other engine sends them again."""

    @property
    def trains(self) -> bool:
        return self.update_tokens > 0


@dataclass(frozen=True)
class PlannedEngine[Spec: EngineSpec]:
    """An engine of a plan, with all engines that live on its ranks."""

    pipeline: Pipeline
    plan: Plan
    name: str
    policy_shape: ModelShape
    """The shape of the pipeline's model."""
    gpu: Gpu | None
    """None on CPU slots, whose memory is the host's."""

    @property
    def executor(self) -> Executor:
        return self.plan.executors[self.name]

    @property
    def spec(self) -> Spec:
        return cast("Spec", self.pipeline.engines[self.name])

    @property
    def group(self) -> GroupSpec:
        return self.pipeline.groups[str(self.spec.group)]

    @property
    def per_node(self) -> int:
        return self.group.ranks // self.group.nodes

    @cached_property
    def shape(self) -> ModelShape:
        """The shape of the engine's model. Raises ValueError if it is unknown."""
        return engine_shape(self.pipeline, self.name, self.policy_shape)

    @cached_property
    def device(self) -> DeviceRates:
        return rates_of(self.gpu)

    @cached_property
    def work(self) -> Workload:
        pipeline, plan, ours = self.pipeline, self.plan, self.executor
        nodes = [node for node in pipeline.nodes.values() if getattr(node, "engine", None) in ours.engines]
        updates = [node for node in nodes if isinstance(node, TrainingNode)]
        prompts, longest = pipeline.data.prompts_per_step, pipeline.longest_row
        rows = (prompts + groups_returned(pipeline)) * plan.samples_per_prompt
        batch = max((math.ceil((node.mini_batch or prompts) / prompts * rows) for node in updates), default=0)

        def tokens(budget: int, of_rows: int) -> int:
            """Tokens of a micro-batch: its budget, unless a replica has fewer rows."""
            return min(budget, math.ceil(of_rows / ours.replicas) * longest)

        passes = [
            node.tokens_per_micro_batch
            for node in nodes
            if isinstance(node, PackingNode) and not isinstance(node, TrainingNode)
        ]
        receivers = [name for name, executor in plan.executors.items() if executor.weights_from == self.name]
        if ours.weights_from is not None:
            receivers.append(self.name)
        teacher = pipeline.hidden_teacher_of(self.name)
        return Workload(
            update_tokens=max((tokens(node.tokens_per_micro_batch, batch) for node in updates), default=0),
            logprob_tokens=tokens(max(passes), rows) if passes else 0,
            micro_batches=max(1, math.ceil(batch / ours.replicas)),
            sums_over_tokens=all(node.loss_is_sum_over_tokens for node in updates),
            prompt_tokens=min(pipeline.data.max_prompt_tokens, longest),
            row_tokens=longest,
            rows_per_prompt=plan.samples_per_prompt,
            longest=self._longest(),
            bucket_bytes=max((weight_route(pipeline, name).bucket_bytes for name in receivers), default=0),
            keeps_start_weights=ours.trained
            and any(pipeline.engines[copy].moving_average is None for copy in ours.engines[1:]),
            keeps_average=pipeline.moving_average_of(self.name) is not None,
            teacher_width=engine_shape(pipeline, teacher, self.policy_shape).hidden if teacher else 0,
            sleeps=ours.sleeps,
            saves_in_background=pipeline.run.async_save and pipeline.run.save_every is not None and ours.trained,
            keeps_weights=ours.weights_from is None or pipeline.engines[ours.weights_from].sent_adapter is not None,
        )

    def _longest(self) -> int:
        """Tokens of the longest sample that it generates or reads; for a judge, of question and reply."""
        pipeline = self.pipeline
        sampled = [
            max(pipeline.longest_rows(name, validated=pipeline.run.validates).values())
            for name, node in pipeline.rollouts.items()
            if node.engine == self.name
        ]
        judges = [node for node in pipeline.nodes.values() if isinstance(node, JudgeNode) and node.engine == self.name]
        asked = [node.max_prompt_tokens + node.sampling.max_new_tokens for node in judges]
        scored = [
            pipeline.longest_scored(node)
            for node in pipeline.nodes.values()
            if isinstance(node, LogprobNode) and node.engine == self.name
        ]
        return max([*sampled, *asked, *scored], default=0)
