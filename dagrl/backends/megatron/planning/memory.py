"""Memory of a Megatron engine: weights, gradients and optimizer of its ranks, and what its passes need besides."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from dagrl.backends.families.shape import ModelShape
from dagrl.backends.megatron.planning.activations import StageActivations, stage_activations, value_bytes
from dagrl.backends.megatron.planning.communicators import communicator_bytes
from dagrl.backends.megatron.planning.stages import (
    RankParameters,
    Stage,
    rank_parameters,
    replicas_of_parameters,
    stages_of,
)
from dagrl.backends.megatron.section import MegatronEngineSpec
from dagrl.backends.megatron.vocabulary import padded_vocab_size
from dagrl.backends.memory import CONTEXT, GIB, EngineMemory, Kind
from dagrl.backends.planned_engine import Workload
from dagrl.models.number_formats import NUMBER_FORMATS

_KERNELS = int(0.24 * GIB)
"""Code and workspaces that stay in a sleep, besides the bare context; measured on H200s."""
_KERNELS_OF_SEVERAL = int(0.3 * GIB)
"""In addition with several ranks, NCCL's code among it; measured on H200s: 0.27 to 0.38 GiB."""
_UNUSABLE = 0.05
"""Share of activations: blocks of torch's allocator that no later tensor fits into. A guess."""
_LOGIT_CHUNK = 2**27
"""Logits of a chunk if they are never whole; see `dagrl.backends.megatron.engine.logprob`."""


def trainer_memory(
    shape: ModelShape, engine: MegatronEngineSpec, ranks: int, work: Workload, *, on_gpu: bool = True
) -> EngineMemory:
    """Return the memory of the fullest GPU: pipeline stages differ. ValueError if the layers do not divide so."""
    stages = stages_of(engine, shape.layers)
    return max(
        (_Rank(shape, engine, stage, ranks, work, on_gpu).memory() for stage in stages),
        key=lambda memory: memory.peak,
    )


@dataclass(frozen=True, slots=True)
class _Rank:
    """One rank of a pipeline stage."""

    shape: ModelShape
    engine: MegatronEngineSpec
    stage: Stage
    ranks: int
    work: Workload
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
        """Yield the moments in which the engine works, with what it holds then."""
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
        # The gradient of the output layer is freed before the backward passes of the layers.
        working = passing.working + parameters.largest * value_bytes(self.engine, on_gpu=self.on_gpu)
        rest = passing.kept + max(0.0, working - logits)
        yield "update", {**weights, **rests, "gradients": states.gradients, **_of_pass(int(rest), logits)}
        yield "optimizer's step", {**weights, "gradients": states.gradients, "optimizer": states.optimizer}

    def _activations(self, tokens: int) -> StageActivations:
        return stage_activations(
            self.shape, self.engine, self.stage, tokens, self.work.micro_batches, on_gpu=self.on_gpu
        )

    def _logits(self, tokens: int, parameters: RankParameters, *, trains: bool) -> int:
        """Return what the head needs for a micro-batch, at most.

        Logits and their gradient, and the hidden states that it reads, which tensor-parallel ranks have whole.
        """
        if not self.stage.is_last:
            return 0
        sizes, value = self.engine.parallel, value_bytes(self.engine, on_gpu=self.on_gpu)
        rows = tokens // sizes.context_parallel_size
        hidden = 2 * rows * self.shape.hidden * value
        if self.engine.head != "lm":
            # A value head reads hidden states in float32 at every token.
            return hidden + (rows * self.shape.hidden * 4 * (1 + trains) if self.engine.head == "value" else 0)
        tensor = sizes.tensor_model_parallel_size
        width = padded_vocab_size(self.shape.vocabulary, tensor) // tensor
        if self.engine.fused_linear_cross_entropy:
            chunk = min(rows, max(1, _LOGIT_CHUNK // width)) * width * value
            return hidden + chunk + trains * (chunk + 4 * width * self.shape.hidden)
        logits = rows * width * value
        return hidden + logits + trains * max(logits, parameters.largest * value)

    def _buffers(self, states: _States) -> int:
        # One bucket is filled while the one before is sent; they hold whole tensors of all ranks.
        sizes = self.engine.parallel
        model = states.weights * sizes.tensor_model_parallel_size * sizes.pipeline_model_parallel_size
        return min(2 * self.work.bucket_bytes, model)

    def _runtime(self) -> tuple[int, int]:
        """Return what there is besides tensors: the part that stays in a sleep, and all of it."""
        if not self.on_gpu:
            return 0, 0
        bare = CONTEXT + _KERNELS + (_KERNELS_OF_SEVERAL if self.ranks > 1 else 0)
        closes = self.work.sleeps and not self.engine.keep_communicators
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
        """Return the pinned memory. Gradients are not kept in a sleep."""
        offload = self.engine.offload
        waiting = states.weights if self.work.sleeps or offload.param else 0
        waiting += states.optimizer if self.work.sleeps or offload.optimizer else 0
        return waiting + states.on_host + (states.weights if self.work.keeps_start_weights else 0)


def _of_pass(activations: int, logits: int) -> dict[Kind, int]:
    unusable = int(_UNUSABLE * (activations + logits))
    return {"activations": activations, "logits": logits, "allocator": unusable}


@dataclass(frozen=True, slots=True)
class _States:
    """Bytes of a rank for any batch."""

    weights: int
    gradients: int = 0
    optimizer: int = 0
    on_host: int = 0
    """States of an optimizer that takes its step on the CPU."""

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
            dense, experts = replicas_of_parameters(engine.parallel, ranks)
            optimized = math.ceil(parameters.dense / dense) + math.ceil(parameters.experts / experts)
        state = state_bytes(fields, value)
        if not fields.get("optimizer_cpu_offload"):
            return _States(weights, gradients, optimized * state)
        # Float32 weights, moments and gradients, on either side; float32 weights are not kept as remainders here.
        there = float(fields.get("optimizer_offload_fraction", 1.0))
        return _States(weights, gradients, int(optimized * 16 * (1 - there)), int(optimized * 16 * there))


def state_bytes(fields: dict[str, Any], value: int) -> int:
    """Return the bytes for one parameter: its float32 weight, if the model has fewer bits, and the moments."""
    precise = bool(fields.get("use_precision_aware_optimizer"))

    def number(name: str) -> int:
        return NUMBER_FORMATS[fields.get(name, "fp32")].nbytes if precise else 4

    moments = number("exp_avg_dtype") + number("exp_avg_sq_dtype")
    if fields.get("optimizer", "adam") == "sgd":
        moments = 4 if fields.get("sgd_momentum", 0.9) else 0
    if value == 4:
        return moments
    main = number("main_params_dtype")
    # The remainder of a bfloat16 weight is two bytes.
    if precise and main == 4 and fields.get("store_param_remainders", True):
        main = 2
    return main + moments
