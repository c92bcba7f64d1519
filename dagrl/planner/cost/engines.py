"""What the executors of a plan compute and move with: their passes, optimizers and servers, and the bytes they hold."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from dagrl.backends.families.shape import ModelShape
from dagrl.backends.hf.section import HfEngineSpec
from dagrl.backends.megatron.section import MegatronEngineSpec
from dagrl.backends.sglang.layout import LARGEST_GRAPH, gpus_per_server
from dagrl.backends.sglang.section import SglangEngineSpec
from dagrl.config.schema import EngineSpec, GroupSpec, Pipeline
from dagrl.planner.cost.decoding import Server
from dagrl.planner.cost.device import Device, device_of
from dagrl.planner.cost.optimizer import OptimizerSteps
from dagrl.planner.cost.passes import Passes
from dagrl.planner.hardware import DEFAULT_GPU, gpu_of_group
from dagrl.planner.memory.classifier import classifier_parameters
from dagrl.planner.memory.server import Serving, cache_tokens, server_memory
from dagrl.scheduler.plan import Executor

WEIGHT_BYTES = 2
_MOST_RUNNING = 2048


@dataclass(frozen=True)
class PlannedEngine:
    """An executor of the plan on its GPUs."""

    pipeline: Pipeline
    executor: Executor
    shape: ModelShape
    gpu: str = DEFAULT_GPU

    @property
    def spec(self) -> EngineSpec:
        """What the file says of it."""
        return self.pipeline.engines[self.executor.name]

    @property
    def group(self) -> GroupSpec:
        """Its slots."""
        assert self.executor.group is not None, f"{self.executor.name} has no group"
        return self.pipeline.groups[self.executor.group]

    @property
    def per_node(self) -> int:
        """Ranks on a machine."""
        return self.group.ranks // self.group.nodes

    @cached_property
    def device(self) -> Device:
        """What a rank reaches."""
        assert self.executor.group is not None, f"{self.executor.name} has no group"
        return device_of(gpu_of_group(self.pipeline, self.executor.group, self.gpu))

    # -- trainers

    @property
    def megatron(self) -> MegatronEngineSpec:
        """The same, of an engine that trains or computes log-probs."""
        assert isinstance(self.spec, MegatronEngineSpec), f"{self.executor.name} does not compute log-probs"
        return self.spec

    @cached_property
    def passes(self) -> Passes:
        """Batches through the model."""
        return Passes(self.shape, self.megatron, self.group.ranks, self.per_node, self.device)

    @cached_property
    def optimizer(self) -> OptimizerSteps:
        """Its optimizer steps."""
        return OptimizerSteps(self.passes.held, self.megatron, self.group.ranks, self.per_node, self.device)

    @property
    def weight_ranks(self) -> int:
        """Ranks that one copy of the weights lies on: experts go beyond replicas, and context does not count."""
        sizes = self.megatron.parallel
        experts = sizes.expert_model_parallel_size * sizes.expert_tensor_parallel_size
        split = max(sizes.tensor_model_parallel_size, 1 if self.shape.experts is None else experts)
        return sizes.pipeline_model_parallel_size * split

    @property
    def lacking(self) -> float:
        """Share of the weights that a rank has to be sent by the others."""
        return max(0.0, 1 - self.passes.held.total / self.shape.parameters)

    @property
    def neighbours_link(self) -> float:
        """The rate to it from there: pipeline stages lie as far from each other as the group reaches."""
        staged = self.megatron.parallel.pipeline_model_parallel_size > 1
        return self.device.link(self.group.ranks if staged else self.weight_ranks, self.per_node)

    @property
    def weight_bytes(self) -> float:
        """Of a rank."""
        return self.passes.held.total * WEIGHT_BYTES

    @property
    def state_bytes(self) -> float:
        """Of the optimizer on a rank's GPU between its steps."""
        return self.optimizer.state_bytes if self.executor.trained else 0.0

    @property
    def state_bytes_on_host(self) -> float:
        """And of what it works on there."""
        return self.optimizer.state_bytes_on_host if self.executor.trained else 0.0

    @property
    def brought_in_s(self) -> float:
        """Seconds for weights that rest on the host to come and go, once for each task."""
        if not self.megatron.offload.param:
            return 0.0
        return self.weight_bytes * (1 / self.device.from_host + 1 / self.device.to_host)

    # -- generators

    @cached_property
    def server(self) -> Server:
        """One copy of the model that generates."""
        match self.spec:
            case SglangEngineSpec() as spec:
                return self._sglang(spec)
            case HfEngineSpec() as spec:
                size = spec.max_batch_size
                return Server(self.shape, self.device, running=size, shares_prompts=False, in_process=True)
        raise AssertionError(f"{self.executor.name} does not generate")

    def _sglang(self, spec: SglangEngineSpec) -> Server:
        fields, gpus = spec.server, gpus_per_server(spec.server)
        stages = int(fields.get("pp_size", 1))
        graph = int(
            fields.get("cuda_graph_max_bs_decode") or min(fields.get("max_running_requests") or 1 << 30, LARGEST_GRAPH)
        )
        return Server(
            self.shape,
            self.device,
            tensor=gpus // stages,
            stages=stages,
            per_node=self.per_node,
            running=int(fields.get("max_running_requests") or _MOST_RUNNING),
            cache_tokens=self._room_for_tokens(spec),
            largest_graph=0 if fields.get("disable_cuda_graph") else graph,
            shares_prompts=not fields.get("disable_radix_cache"),
        )

    def _room_for_tokens(self, spec: SglangEngineSpec) -> float:
        gpu = gpu_of_group(self.pipeline, str(spec.group), self.gpu)
        memory = server_memory(self.shape, spec, gpu, Serving(longest=1, sleeps=self.executor.sleeps))
        return max(1, cache_tokens(self.shape, spec, memory, on_gpu=gpu is not None))

    # -- reward models inside their workers

    @cached_property
    def classifier_parameters(self) -> int:
        """Of the whole model; `shape` is that of the pipeline's."""
        return classifier_parameters(self.pipeline, self.executor.name, self.shape)

    # -- what both have

    @property
    def served_bytes(self) -> float:
        """Of the weights on a GPU of one that generates or judges."""
        if isinstance(self.spec, HfEngineSpec) and self.spec.head == "reward":
            return self.classifier_parameters * WEIGHT_BYTES
        gpus = gpus_per_server(self.spec.server) if isinstance(self.spec, SglangEngineSpec) else 1
        return self.shape.parameters * WEIGHT_BYTES / gpus

    @property
    def backed_up_bytes(self) -> float:
        """Of the weights on a GPU, where they wait on the host while it sleeps: nobody sends them again."""
        classifies = isinstance(self.spec, HfEngineSpec) and self.spec.head == "reward"
        served = isinstance(self.spec, SglangEngineSpec) and not self.spec.weights_from
        return self.served_bytes if classifies or served else 0.0
