"""One rank of a Megatron-core engine; implements `TrainEngine` with the parts of this package."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.optimizer import get_megatron_optimizer

from dagrl.backends.backend import RankContext
from dagrl.backends.base import Objective, SleepReport, TokenOutputs
from dagrl.backends.families.registry import buildable
from dagrl.backends.megatron.engine import bridge, checkpoint, communicators, distributed, export, hf_weights
from dagrl.backends.megatron.engine.adapters import add_adapters, with_dropout, without_adapters
from dagrl.backends.megatron.engine.background_save import BackgroundWriter
from dagrl.backends.megatron.engine.config import transformer_config
from dagrl.backends.megatron.engine.loss import join_replicas
from dagrl.backends.megatron.engine.memory import EngineOffloader, release_caches
from dagrl.backends.megatron.engine.model import build_model
from dagrl.backends.megatron.engine.moving_average import MovingAverage, StartWeights
from dagrl.backends.megatron.engine.optimizer import (
    apply_gradient,
    clear_gradients,
    ddp_config,
    gather_parameters,
    make_schedule,
    optimizer_config,
    wrap_for_training,
)
from dagrl.backends.megatron.engine.router_replay import RouterReplay
from dagrl.backends.megatron.engine.step import PackedModel
from dagrl.backends.megatron.engine.stored_weights import load_start_weights
from dagrl.backends.megatron.engine.teacher_head import TeacherHead
from dagrl.backends.megatron.section import MegatronEngineSpec
from dagrl.backends.runtime.device_memory import device_gib_used
from dagrl.backends.runtime.initial_weights import weight_source
from dagrl.config.residency import Residency
from dagrl.config.schema import ModelSpec
from dagrl.data.batch import Batch, Column
from dagrl.data.stats import Stat, merge
from dagrl.model_files.images import image_settings
from dagrl.model_files.library_model import load_hf_config
from dagrl.weight_sync.exporter import WeightExporter, exported
from dagrl.weight_sync.manifest import Bucket

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class MegatronEngine:
    """A rank of a Megatron engine; a `dagrl.backends.base.TrainEngine`. One in a process."""

    def __init__(
        self,
        model: ModelSpec,
        spec: MegatronEngineSpec,
        ranks: RankContext,
        *,
        train_steps: int,
        trainable: bool,
        keep_start_weights: bool = False,
        moving_average: float | None = None,
        teacher: ModelSpec | None = None,
        keeps_no_cache: bool = False,
    ) -> None:
        """Join the other ranks and build the model with its initial weights. Collective.

        `train_steps` is the length of the learning-rate schedule; only a `trainable` engine has an optimizer.
        `keep_start_weights` is for `start_weights`, and `moving_average`, a rate, for `average_weights`. `teacher` is
        the model whose hidden states an update reads.
        `keeps_no_cache` frees cached device memory after each task. ValueError for errors of the pipeline, TimeoutError
        if the ranks do not meet.
        """
        self.policy_version = 0
        self._hf_config = load_hf_config(model)
        config = transformer_config(self._hf_config, spec)
        training_configs = (ddp_config(spec), optimizer_config(spec, config.params_dtype)) if trainable else None
        load_weights, self._make_exporter = converter(self._hf_config, spec)
        distributed.start(ranks, spec.parallel)
        self._timeout_s, self._gib_used_by_others = ranks.timeout_s, device_gib_used()
        self._keeps_no_cache, self._keeps_communicators = keeps_no_cache, spec.keep_communicators
        chunks = build_model(self._hf_config, spec, config)
        if spec.dist_checkpointing_path is not None:
            load_start_weights(chunks, self._hf_config, spec.dist_checkpointing_path, spec.head)
        else:
            load_weights(chunks, self._hf_config, weight_source(model, ranks.seed))
        self._has_adapters = spec.lora is not None
        if spec.lora is not None:
            add_adapters(chunks, self._hf_config, spec.lora, head=spec.head, seed=ranks.seed, trainable=trainable)
        # The adapters leave the initial weights as they are.
        self._start_weights = StartWeights(chunks) if keep_start_weights and not self._has_adapters else None
        self._training: checkpoint.TrainingState | None = None
        self._writer = BackgroundWriter(ranks.timeout_s)
        self._average = MovingAverage(chunks, moving_average) if moving_average is not None else None
        if training_configs is not None:
            chunks = wrap_for_training(chunks, training_configs[0])
            # It may copy weights to float32, so they must be loaded before.
            optimizer = get_megatron_optimizer(training_configs[1], chunks)
            schedule = make_schedule(optimizer, spec.lr_schedule, train_steps=train_steps)
            self._training = checkpoint.TrainingState(chunks, optimizer, schedule, spec.parallel, self._average)
        optimizer = self._training.optimizer if self._training else None
        sends_trained = trainable and spec.sent_adapter is not None
        vocab_size = self._hf_config.get_text_config().vocab_size
        head = TeacherHead.load(teacher, chunks, vocab_size, ranks.seed) if teacher is not None else None
        further = [head.weight] if head is not None else []
        self._memory = EngineOffloader(chunks, optimizer, spec.offload, sends_trained=sends_trained, further=further)
        self._model = PackedModel(
            chunks,
            vocab_size,
            spec.parallel.row_alignment,
            head=spec.head,
            fused=spec.fused_linear_cross_entropy,
            replay=RouterReplay(chunks) if spec.router_replay else None,
            vision=image_settings(model),
            shares_prefixes=spec.prefix_sharing,
            teacher=head,
        )
        self._tidy_up()

    def logprobs(self, batch: Batch, *, temperature: float, tokens_per_micro_batch: int) -> Column:
        """See `TrainEngine.logprobs`. Raises ValueError if a row is longer than `tokens_per_micro_batch`."""
        budget = tokens_per_micro_batch
        return self.token_outputs(batch, TokenOutputs(), temperature=temperature, tokens_per_micro_batch=budget)[
            "logprob"
        ]

    def token_outputs(
        self, batch: Batch, outputs: TokenOutputs, *, temperature: float, tokens_per_micro_batch: int
    ) -> dict[str, Column]:
        """See `TrainEngine.token_outputs`. Raises ValueError if a row is longer than `tokens_per_micro_batch`."""
        with self._at_work(), self._memory.weights():
            return self._model.token_outputs(
                batch, outputs, temperature=temperature, tokens_per_micro_batch=tokens_per_micro_batch
            )

    def values(self, batch: Batch, *, tokens_per_micro_batch: int) -> Column:
        """See `TrainEngine.values`. Raises ValueError if a row is longer than `tokens_per_micro_batch`."""
        with self._at_work(), self._memory.weights():
            return self._model.values(batch, tokens_per_micro_batch=tokens_per_micro_batch)

    def update(
        self,
        mini_batches: Sequence[Batch],
        objective: Objective[Any],
        *,
        tokens_per_micro_batch: int,
        begins: bool = True,
        ends: bool = True,
    ) -> dict[str, Stat]:
        """See `TrainEngine.update`. The learning rate advances at the beginning of a step, once for all its
        mini-batches.

        Metrics are means over the whole call, weighted by their counts; ``grad_norm`` is taken before clipping.
        """
        self._writer.wait_until_copied()
        if begins:
            self._own_training().schedule.step(1)
        with self._at_work(), self._memory.gradients():
            stats = self._update(mini_batches, objective, tokens_per_micro_batch)
            if ends and self._average is not None:
                self._average.advance()
        self.policy_version += ends
        return stats

    @contextmanager
    def _at_work(self) -> Iterator[None]:
        yield
        self._tidy_up()

    def _tidy_up(self) -> None:
        if self._keeps_no_cache and torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _update(
        self, mini_batches: Sequence[Batch], objective: Objective[Any], tokens_per_micro_batch: int
    ) -> dict[str, Stat]:
        training = self._own_training()
        lr = training.schedule.get_lr({})
        metrics, norms = [], []
        for mini_batch in mini_batches:
            clear_gradients(training.chunks, training.optimizer)
            with with_dropout(training.chunks) if self._has_adapters else nullcontext():
                budget = tokens_per_micro_batch
                metrics.append(self._model.accumulate_gradient(mini_batch, objective, tokens_per_micro_batch=budget))
            try:
                with self._memory.optimizer():
                    norms.append(apply_gradient(training.optimizer))
            except FloatingPointError as error:
                place = f"policy version {self.policy_version}, mini-batch {len(metrics)} of {len(mini_batches)}"
                figures = _readable({"lr": Stat.of([lr]), **join_replicas(metrics[-1])})
                raise FloatingPointError(f"{place}: {error}; {figures}; norms before it: {norms}") from error
        gather_parameters(training.chunks)
        return join_replicas(merge(metrics)) | {"grad_norm": Stat.of(norms), "lr": Stat.of([lr])}

    def sleep(self, residency: Residency = Residency.ASLEEP) -> SleepReport:
        """See `Engine.sleep`. RuntimeError if it is already asleep; TimeoutError if other ranks do not sleep.

        The figures are the driver's for the whole device, with what other processes allocate meanwhile.
        """
        self._writer.wait_until_copied()
        before = device_gib_used()
        self._memory.sleep(residency)
        # Exporting weights needs the communicators until then.
        if residency is Residency.ASLEEP and not self._keeps_communicators:
            communicators.close_all(self._timeout_s)
        release_caches()
        return SleepReport(freed_gib=before - device_gib_used(), held_gib=before - self._gib_used_by_others)

    def wake(self, residency: Residency = Residency.AWAKE) -> None:
        """See `Engine.wake`. RuntimeError if it is already awake. Communicators connect again in the first task."""
        was_asleep = self._memory.residency is Residency.ASLEEP
        self._memory.wake(residency)
        if was_asleep and not self._keeps_communicators:
            communicators.open_all()

    @contextmanager
    def start_weights(self) -> Iterator[None]:
        """See `TrainEngine.start_weights`; a trainable engine must have been built with `keep_start_weights`."""
        keeps = self._training is None or self._start_weights or self._has_adapters
        assert keeps, "the engine was not built to keep its start weights"
        with self._memory.weights():
            if self._has_adapters:
                with without_adapters(self._model.chunks):
                    yield
                return
            if self._start_weights is None:
                yield
                return
            self._writer.wait_until_copied()
            with self._start_weights.in_place():
                yield

    @contextmanager
    def average_weights(self) -> Iterator[None]:
        """See `TrainEngine.average_weights`; the engine must have been built with a `moving_average`."""
        assert self._average is not None, "the engine was not built to average its weights"
        with self._memory.weights():
            self._writer.wait_until_copied()
            with self._average.in_place():
                yield

    def weight_exporter(self, bucket_bytes: int, *, by_owner: bool = False) -> WeightExporter:
        chunks, present = self._model.chunks, self._weights_alone
        return self._make_exporter(chunks, self._hf_config, bucket_bytes, present, by_owner=by_owner)

    @contextmanager
    def _weights_alone(self) -> Iterator[None]:
        """Context that frees the device memory of an exporter and its sender at the end."""
        with self._at_work(), self._memory.sent():
            yield

    def export_weights(self, bucket_bytes: int) -> Iterator[Bucket]:
        return exported(self.weight_exporter(bucket_bytes), is_root=torch.distributed.get_rank() == 0)

    def save(self, folder: Path, *, asynchronous: bool = False) -> None:
        """See `TrainEngine.save`. OSError if the state cannot be written."""
        training = self._own_training()
        with self._at_work(), self._memory.optimizer():
            checkpoint.save(
                folder, training, self._writer, policy_version=self.policy_version, asynchronous=asynchronous
            )
            if self._memory.rests_away:
                self._writer.wait_until_copied()

    def finish_save(self, *, wait: bool) -> bool:
        """See `TrainEngine.finish_save`. Raises OSError if the state could not be written."""
        return self._writer.finish(wait=wait)

    def load(self, folder: Path) -> None:
        """See `TrainEngine.load`. Raises FileNotFoundError or ValueError for a folder that cannot be loaded."""
        self._writer.wait_until_copied()
        with self._at_work(), self._memory.optimizer():
            if self._training is None:
                self.policy_version = checkpoint.load_weights(folder, self._model.chunks, self._average)
            else:
                self.policy_version = checkpoint.load(folder, self._training)

    def close(self) -> None:
        """Leave the other ranks. The engine cannot be used afterwards."""
        distributed.stop()

    def _own_training(self) -> checkpoint.TrainingState:
        assert self._training is not None, "the engine was not built to train"
        return self._training


def converter(
    hf_config: PretrainedConfig, spec: MegatronEngineSpec
) -> tuple[Callable[..., None], Callable[..., WeightExporter]]:
    """The functions that load and export Hugging Face weights: by the family's tables, if it has them."""
    family, _ = buildable(hf_config.to_dict())
    if family.has_tables:
        exporter = partial(export.make_exporter, head=spec.head, lora=spec.lora)
        return partial(hf_weights.load_hf_weights, head=spec.head), exporter
    return bridge.load_hf_weights, bridge.make_exporter


def _readable(stats: Mapping[str, Stat]) -> str:
    return ", ".join(f"{name} {stat.mean:.6g}" for name, stat in stats.items())
