"""Memory of a Megatron engine: weights, gradients and optimizer of its ranks, and what its passes need beside them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from dagrl.backends.families.shape import ModelShape
from dagrl.backends.megatron.section import MegatronEngineSpec
from dagrl.backends.megatron.vocabulary import padded_vocab_size
from dagrl.models.number_formats import NUMBER_FORMATS
from dagrl.planner.memory.activations import StageActivations, stage_activations, value_bytes
from dagrl.planner.memory.communicators import communicator_bytes
from dagrl.planner.memory.estimate import CONTEXT, GIB, EngineMemory, Kind
from dagrl.planner.memory.parameters import RankParameters, rank_parameters
from dagrl.planner.memory.stages import Stage, stages_of

_KERNELS = int(0.24 * GIB)
"""Code and workspaces that stay, even asleep, beside the bare context; measured on H200s."""
_KERNELS_OF_SEVERAL = int(0.3 * GIB)
"""More of that where ranks talk to each other, NCCL's code among it; measured on H200s: 0.27 to 0.38 GiB."""
_UNUSABLE = 0.05
"""Of activations: blocks of torch's allocator that no later tensor fits into. A guess."""
_LOGIT_CHUNK = 2**27
"""Logits that are worked on at once where they are never whole; see `dagrl.backends.megatron.engine.logprob`."""


@dataclass(frozen=True, slots=True)
class Work:
    """What is asked of an engine, at its largest."""

    update_tokens: int = 0
    """Of an update's micro-batch; 0 where the engine is not trained."""
    logprob_tokens: int = 0
    """Of a micro-batch of log-probs or values."""
    micro_batches: int = 1_000_000
    """Of one update, at most: fewer than pipeline stages leave stages empty."""
    bucket_bytes: int = 0
    """Of weights that are sent; 0 where nobody follows."""
    keeps_start_weights: bool = False
    """Whether another engine is its frozen copy."""

    @property
    def trains(self) -> bool:
        """Whether there are gradients and an optimizer."""
        return self.update_tokens > 0


def trainer_memory(
    shape: ModelShape, engine: MegatronEngineSpec, ranks: int, work: Work, *, sleeps: bool = False, on_gpu: bool = True
) -> EngineMemory:
    """Of the fullest of its GPUs: pipeline stages differ. ValueError where layers cannot be shared out."""
    stages = stages_of(engine, shape.layers)
    return max(
        (_Rank(shape, engine, stage, ranks, work, sleeps, on_gpu).memory() for stage in stages),
        key=lambda memory: memory.peak,
    )


@dataclass(frozen=True, slots=True)
class _Rank:
    """One rank of a pipeline stage."""

    shape: ModelShape
    engine: MegatronEngineSpec
    stage: Stage
    ranks: int
    work: Work
    sleeps: bool
    on_gpu: bool

    def memory(self) -> EngineMemory:
        parameters = rank_parameters(self.shape, self.engine, self.stage)
        states = _States.of(parameters, self.engine, self.ranks, trains=self.work.trains, on_gpu=self.on_gpu)
        moment, awake = max(self._moments(parameters, states), key=lambda found: sum(found[1].values()))
        stays, runtime = self._runtime()
        if self.stage.stages > 1:
            moment = f"{moment}, stage {self.stage.index + 1} of {self.stage.stages}"
        return EngineMemory(
            awake={**awake, "runtime": runtime},
            moment=moment,
            weights_alone=states.weights + self._buffers(states) + runtime,
            asleep=stays,
            host=self._host(states),
        )

    def _moments(self, parameters: RankParameters, states: _States) -> Iterator[tuple[str, dict[Kind, int]]]:
        """When the engine works, and what it holds then."""
        offload, work = self.engine.offload, self.work
        rests: dict[Kind, int] = {
            "gradients": 0 if offload.grad else states.gradients,
            "optimizer": 0 if offload.optimizer else states.optimizer,
        }
        weights: dict[Kind, int] = {"weights": states.weights}
        yield "sync", {**weights, **rests, "buffers": self._buffers(states)}
        if work.logprob_tokens:
            passing = self._activations(work.logprob_tokens)
            logits = self._logits(work.logprob_tokens, parameters, trains=False)
            yield "log-probs", {**weights, **rests, **_of_pass(max(0, int(passing.forward) - logits), logits)}
        if not work.trains:
            return
        passing = self._activations(work.update_tokens)
        logits = self._logits(work.update_tokens, parameters, trains=True)
        # The output layer's gradient is gone before the layers' backward passes begin.
        working = passing.working + parameters.largest * value_bytes(self.engine, on_gpu=self.on_gpu)
        rest = passing.kept + max(0.0, working - logits)
        yield "update", {**weights, **rests, "gradients": states.gradients, **_of_pass(int(rest), logits)}
        yield "optimizer's step", {**weights, "gradients": states.gradients, "optimizer": states.optimizer}

    def _activations(self, tokens: int) -> StageActivations:
        return stage_activations(
            self.shape, self.engine, self.stage, tokens, self.work.micro_batches, on_gpu=self.on_gpu
        )

    def _logits(self, tokens: int, parameters: RankParameters, *, trains: bool) -> int:
        """What the head needs for every token of a micro-batch, at most: logits and their gradient, and the hidden
        states that it reads, which tensor-parallel ranks have whole.
        """
        if not self.stage.is_last:
            return 0
        sizes, value = self.engine.parallel, value_bytes(self.engine, on_gpu=self.on_gpu)
        rows = tokens // sizes.context_parallel_size
        hidden = 2 * rows * self.shape.hidden * value
        if self.engine.head != "lm":
            # Read at every token, hidden states and their gradient are there in float32 too.
            return hidden + (rows * self.shape.hidden * 4 * (1 + trains) if self.engine.head == "value" else 0)
        tensor = sizes.tensor_model_parallel_size
        width = padded_vocab_size(self.shape.vocabulary, tensor) // tensor
        if self.engine.fused_linear_cross_entropy:
            chunk = min(rows, max(1, _LOGIT_CHUNK // width)) * width * value
            return hidden + chunk + trains * (chunk + 4 * width * self.shape.hidden)
        logits = rows * width * value
        return hidden + logits + trains * max(logits, parameters.largest * value)

    def _buffers(self, states: _States) -> int:
        # One bucket is being filled while the one before is on its way; they hold whole tensors of all ranks.
        sizes = self.engine.parallel
        model = states.weights * sizes.tensor_model_parallel_size * sizes.pipeline_model_parallel_size
        return min(2 * self.work.bucket_bytes, model)

    def _runtime(self) -> tuple[int, int]:
        """Beside tensors: what stays while it sleeps, and all of it. Without devices it is the host's."""
        if not self.on_gpu:
            return 0, 0
        bare = CONTEXT + _KERNELS + (_KERNELS_OF_SEVERAL if self.ranks > 1 else 0)
        closes = self.sleeps and not self.engine.keep_communicators
        whole = bare + communicator_bytes(
            self.shape,
            self.engine.parallel,
            self.ranks,
            trains=self.work.trains,
            sends=self.work.bucket_bytes > 0,
            closes=closes,
        )
        return bare if closes else whole, whole

    def _host(self, states: _States) -> int:
        """Pinned memory that is taken once: gradients are not kept anywhere."""
        offload = self.engine.offload
        waiting = states.weights if self.sleeps or offload.param else 0
        waiting += states.optimizer if self.sleeps or offload.optimizer else 0
        return waiting + states.on_host + (states.weights if self.work.keeps_start_weights else 0)


def _of_pass(activations: int, logits: int) -> dict[Kind, int]:
    unusable = int(_UNUSABLE * (activations + logits))
    return {"activations": activations, "logits": logits, "allocator": unusable}


@dataclass(frozen=True, slots=True)
class _States:
    """Bytes of a rank that do not depend on the batch."""

    weights: int
    gradients: int = 0
    optimizer: int = 0
    on_host: int = 0
    """Of the optimizer, where it takes its step on the CPU."""

    @staticmethod
    def of(
        parameters: RankParameters, engine: MegatronEngineSpec, ranks: int, *, trains: bool, on_gpu: bool
    ) -> _States:
        value = value_bytes(engine, on_gpu=on_gpu)
        weights = parameters.total * value
        if not trains:
            return _States(weights)
        gradients = parameters.total * (4 if engine.ddp.get("grad_reduce_in_fp32", True) else value)
        fields = engine.optimizer
        if not fields.get("use_distributed_optimizer", True):
            optimized = parameters.total
        else:
            dense, experts = _copies(engine, ranks)
            optimized = math.ceil(parameters.dense / dense) + math.ceil(parameters.experts / experts)
        state = state_bytes(fields, value)
        if not fields.get("optimizer_cpu_offload"):
            return _States(weights, gradients, optimized * state)
        # Float32 weights, moments, and a gradient in the precision of the float32 weights, wherever a parameter's
        # step is taken; here they are not the remainders that bfloat16 weights leave.
        there = float(fields.get("optimizer_offload_fraction", 1.0))
        return _States(weights, gradients, int(optimized * 16 * (1 - there)), int(optimized * 16 * there))


def _copies(engine: MegatronEngineSpec, ranks: int) -> tuple[int, int]:
    """Ranks that hold the same parameters, and the same experts: each has its share of their optimizer."""
    sizes = engine.parallel
    stage = ranks // sizes.pipeline_model_parallel_size
    experts = sizes.expert_model_parallel_size * sizes.expert_tensor_parallel_size
    return stage // sizes.tensor_model_parallel_size, stage // experts


def state_bytes(fields: dict[str, Any], value: int) -> int:
    """Of one parameter: its float32 weight, where the model has it in fewer bits, and what the optimizer remembers."""
    precise = bool(fields.get("use_precision_aware_optimizer"))

    def number(name: str) -> int:
        return NUMBER_FORMATS[fields.get(name, "fp32")].nbytes if precise else 4

    moments = number("exp_avg_dtype") + number("exp_avg_sq_dtype")
    if fields.get("optimizer", "adam") == "sgd":
        moments = 4 if fields.get("sgd_momentum", 0.9) else 0
    if value == 4:
        return moments
    main = number("main_params_dtype")
    # What a bfloat16 weight lacks of a float32 one are two bytes.
    if precise and main == 4 and fields.get("store_param_remainders", True):
        main = 2
    return main + moments
