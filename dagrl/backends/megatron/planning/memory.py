"""Memory of a Megatron engine: weights, gradients and optimizer of its ranks, and activations of its passes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from dagrl.backends.families.shape import ModelShape
from dagrl.backends.megatron.planning.activations import StageActivations, stage_activations, value_bytes
from dagrl.backends.megatron.planning.costs import communicator_bytes
from dagrl.backends.megatron.planning.stages import RankParameters, Stage, optimizer_states, rank_parameters, stages_of
from dagrl.backends.megatron.section import MegatronEngineSpec, padded_vocab_size
from dagrl.backends.planning.memory import CONTEXT, GIB, EngineMemory, Kind
from dagrl.backends.planning.planned_engine import Workload

_KERNELS = int(0.24 * GIB)
"""Code and workspaces that stay in a sleep, in addition to the bare context; measured on H200s."""
_KERNELS_OF_SEVERAL = int(0.3 * GIB)
"""In addition with several ranks, including NCCL's code; measured on H200s: 0.27 to 0.38 GiB."""
_UNUSABLE = 0.05
"""Share of activations that is lost in blocks of torch's allocator into which no later tensor fits. An estimate."""
_LOGIT_CHUNK = 2**27
"""Logits of a chunk if they are never whole; see `dagrl.backends.megatron.engine.logprob`."""
_CHUNKS_ONCE = 5
"""Chunks in a product if logits are computed once, overwritten by their gradients (`engine.linear_loss`)."""
_CHUNKS_TWICE = 2
"""The same if they are recomputed for their gradients, and without gradients."""

_SYNC = "sync"


def trainer_memory(
    shape: ModelShape, engine: MegatronEngineSpec, ranks: int, work: Workload, *, on_gpu: bool = True
) -> EngineMemory:
    """Return the memory of the fullest GPU: pipeline stages differ. ValueError if the layers do not divide so."""
    stages = stages_of(engine, shape.layers)
    return max(
        (_Rank(shape, engine, stage, ranks, work, on_gpu).memory() for stage in stages), key=lambda memory: memory.peak
    )


@dataclass(frozen=True, slots=True)
class _Rank:
    shape: ModelShape
    engine: MegatronEngineSpec
    stage: Stage
    ranks: int
    work: Workload
    on_gpu: bool

    def memory(self) -> EngineMemory:
        parameters = rank_parameters(self.shape, self.engine, self.stage)
        states = _States.of(parameters, self.engine, self.ranks, trains=self.work.trains, on_gpu=self.on_gpu)
        moments = dict(self._moments(parameters, states))
        moment, awake = max(moments.items(), key=lambda moment: sum(moment[1].values()))
        stays, runtime = self._runtime()
        if self.stage.stages > 1:
            moment = f"{moment}, stage {self.stage.index + 1} of {self.stage.stages}"
        return EngineMemory(
            awake={**awake, "runtime": runtime},
            moment=moment,
            weights_alone=self._sent(states) + self._buffers(states) + runtime,
            asleep=stays,
            # torch's cache is released after each task.
            at_rest=sum(moments[_SYNC].values()) + runtime,
            host=self._host(states),
        )

    def _moments(self, parameters: RankParameters, states: _States) -> Iterator[tuple[str, dict[Kind, int]]]:
        offload, work = self.engine.offload, self.work
        rests: dict[Kind, int] = {
            "gradients": 0 if offload.grad else states.gradients,
            "optimizer": 0 if offload.optimizer else states.optimizer,
        }
        weights: dict[Kind, int] = {"weights": states.weights + self._teacher}
        yield _SYNC, {**rests, "weights": self._sent(states), "buffers": self._buffers(states)}
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
            self.shape,
            self.engine,
            self.stage,
            tokens,
            self.work.micro_batches,
            copied_keys=self._copied_keys(tokens),
            on_gpu=self.on_gpu,
        )

    def _copied_keys(self, tokens: int) -> float:
        """Return the number of keys in excess of tokens that attention reads: each response has a copy of a shared
        prompt's keys.
        """
        work = self.work
        response = work.row_tokens - work.prompt_tokens
        if not self.engine.prefix_sharing or response <= 0:
            return 0.0
        sharing = min(work.rows_per_prompt, max(1, (tokens - work.prompt_tokens) // response))
        return tokens / (work.prompt_tokens + sharing * response) * sharing * work.prompt_tokens

    def _logits(self, tokens: int, parameters: RankParameters, *, trains: bool) -> int:
        """Return the peak bytes of the head for a micro-batch: logits, their gradient, and its hidden states."""
        if not self.stage.is_last:
            return 0
        sizes, value = self.engine.parallel, value_bytes(self.engine, on_gpu=self.on_gpu)
        rows = tokens // sizes.cp
        hidden = 2 * rows * self.shape.hidden * value
        if self.engine.head != "lm":
            # A value head reads hidden states in float32 at every token.
            return hidden + (rows * self.shape.hidden * 4 * (1 + trains) if self.engine.head == "value" else 0)
        width = self._width
        if trains and self.work.teacher_width:
            # Hidden states are bfloat16; of the teacher's logits there is a product at a time.
            products = _CHUNKS_ONCE if self.work.sums_over_tokens else _CHUNKS_TWICE
            part = products if self.engine.fused_linear_cross_entropy else 1
            given = min(rows, part * max(1, _LOGIT_CHUNK // width))
            hidden += 2 * rows * self.work.teacher_width + given * width * value
        if self.engine.fused_linear_cross_entropy:
            chunk = max(1, _LOGIT_CHUNK // width)
            twice = min(rows, _CHUNKS_TWICE * chunk)
            held = min(rows, _CHUNKS_ONCE * chunk) if self.work.sums_over_tokens else 2 * twice
            gradient = 0 if self.engine.lora else 4 * width * self.shape.hidden
            return hidden + (held * width * value + gradient if trains else twice * width * value)
        logits = rows * width * value
        return hidden + logits + trains * max(logits, parameters.largest * value)

    @property
    def _width(self) -> int:
        """The columns of logits."""
        tensor = self.engine.parallel.tp
        return padded_vocab_size(self.shape.vocabulary, tensor) // tensor

    @property
    def _teacher(self) -> int:
        """Bytes of a teacher's output layer."""
        return self.stage.is_last * self._width * self.work.teacher_width * value_bytes(self.engine, on_gpu=self.on_gpu)

    def _buffers(self, states: _States) -> int:
        # One bucket is filled while the previous one is sent; they hold whole tensors of all ranks.
        sizes = self.engine.parallel
        weights = states.trained if self.engine.sent_adapter else states.weights
        model = weights * sizes.tp * sizes.pp
        return min(2 * self.work.bucket_bytes, model)

    def _sent(self, states: _States) -> int:
        if self.engine.sent_adapter and self.engine.offload.param:
            return states.trained
        return states.weights + self._teacher

    def _runtime(self) -> tuple[int, int]:
        """Return memory outside of tensors: the part that stays in a sleep, and the total."""
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
        offload = self.engine.offload
        waiting = states.weights + self._teacher if self.work.sleeps or offload.param else 0
        waiting += states.optimizer if self.work.sleeps or offload.optimizer else 0
        # Without its adapters the model has its start weights.
        keeps_start = self.work.keeps_start_weights and self.engine.lora is None
        # In float32, and room for the engine's own weights while the averages are in their place.
        average = 4 * states.trained // value_bytes(self.engine, on_gpu=self.on_gpu) if self.work.keeps_average else 0
        aside = states.trained if average else 0
        # Copies for the disk, in addition to copies of a sleep.
        copied = states.trained + states.optimizer + average if self.work.saves_in_background else 0
        return waiting + copied + states.on_host + (states.weights if keeps_start else 0) + average + aside


def _of_pass(activations: int, logits: int) -> dict[Kind, int]:
    unusable = int(_UNUSABLE * (activations + logits))
    return {"activations": activations, "logits": logits, "allocator": unusable}


@dataclass(frozen=True, slots=True)
class _States:
    weights: int
    trained: int = 0
    """The part of `weights` that an update changes."""
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
        gradients = sum(parameters.trained) * (4 if engine.ddp.get("grad_reduce_in_fp32", True) else value)
        states = optimizer_states(parameters, engine, ranks, value)
        # A step on the host keeps its float32 gradients too, on either side.
        copies = 4 * states.parameters if engine.optimizer.get("optimizer_cpu_offload") else 0.0
        on_device = states.on_device + copies * (1 - states.host_share)
        on_host = states.on_host + copies * states.host_share
        return _States(weights, sum(parameters.trained) * value, gradients, int(on_device), int(on_host))
