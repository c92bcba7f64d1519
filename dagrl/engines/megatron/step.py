"""Forward and backward passes: a batch through the model in packed micro-batches, to log-probs or to a gradient.

Only the positions that predict response tokens reach the output layer. The schedule of micro-batches is megatron's;
`micro_batch` packs, `logprob` turns logits into log-probs, and the `Objective` turns those into a loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import (
    gather_from_sequence_parallel_region,
    linear_with_grad_accumulation_and_async_allreduce,
)
from megatron.core.transformer import MegatronModule, TransformerConfig

from dagrl.data.batch import Batch, Column
from dagrl.engines.base import Objective, ResponseTokens
from dagrl.engines.megatron.logprob import token_logprobs
from dagrl.engines.megatron.micro_batch import MicroBatch, split_batch

Sums = dict[str, tuple[float, float]]
"""Metrics as name -> (sum, count)."""

LossFunction = Callable[..., Any]
"""What megatron's schedule calls with the model's output on a micro-batch."""


@dataclass(frozen=True, slots=True)
class PackedModel:
    """One rank's part of a model, run over packed micro-batches. Every method is collective."""

    chunks: list[MegatronModule]
    """The model's chunks on this rank; wrapped for data-parallel training where gradients are asked for."""
    vocab_size: int
    """Tokens of the model; columns of the output layer beyond it are padding."""
    alignment: int
    """What the length of every packed row is a multiple of; see `micro_batch.row_alignment`."""

    def logprobs(self, batch: Batch, *, temperature: float, tokens_per_micro_batch: int) -> Column:
        """Log-probs of the response tokens, without gradients, float32, ragged as response_tokens."""
        micro_batches = self._split(batch, tokens_per_micro_batch)
        prediction = _Prediction(self.vocab_size, temperature, with_entropy=False)

        def take(output: torch.Tensor, non_loss_data: bool) -> np.ndarray:
            return output[0].cpu().numpy()

        with torch.no_grad():
            values = self._run(micro_batches, prediction, lambda micro_batch: take, forward_only=True)
        if len(batch) == 0:
            return Column.ragged([], "float32")
        rows = np.concatenate([micro_batch.rows for micro_batch in micro_batches])
        lengths = batch["response_tokens"].lengths[rows]
        packed = Column(np.concatenate(values), np.concatenate([[0], np.cumsum(lengths)]))
        return packed.take(np.argsort(rows))

    def accumulate_gradient(self, batch: Batch, objective: Objective, *, tokens_per_micro_batch: int) -> Sums:
        """Add the gradient of the objective over all ranks' batches to the gradient buffers, and reduce it.

        Returns this rank's share of the metrics; see `sum_over_replicas`.
        """
        micro_batches = self._split(batch, tokens_per_micro_batch)
        prediction = _Prediction(self.vocab_size, objective.temperature, objective.needs_entropy)
        weights = _normalized_weights(batch, objective)

        def finish(micro_batch: MicroBatch) -> LossFunction:
            return partial(_loss_share, micro_batch=micro_batch, batch=batch, weights=weights, objective=objective)

        metrics = self._run(micro_batches, prediction, finish, forward_only=False)
        return add_up({name: (float(s), float(n)) for name, (s, n) in part.items()} for part in metrics)

    def _split(self, batch: Batch, tokens: int) -> list[MicroBatch]:
        device = next(self.chunks[0].parameters()).device
        return split_batch(batch, tokens=tokens, alignment=self.alignment, device=device)

    def _run(
        self,
        micro_batches: Sequence[MicroBatch],
        prediction: _Prediction,
        finish: Callable[[MicroBatch], LossFunction],
        *,
        forward_only: bool,
    ) -> list[Any]:
        """Take every micro-batch through the model; what ``finish(micro_batch)`` makes of each output."""

        def forward(waiting: Iterator[MicroBatch], model: MegatronModule) -> tuple[torch.Tensor, LossFunction]:
            micro_batch = next(waiting)
            output = model(
                input_ids=micro_batch.input_ids,
                position_ids=micro_batch.position_ids,
                attention_mask=None,
                packed_seq_params=micro_batch.sequences,
                output_processor=_predict,
                output_processor_context=replace(prediction, micro_batch=micro_batch),
            )
            return output, finish(micro_batch)

        for chunk in self.chunks:
            chunk.train(not forward_only)
        return get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=[iter(micro_batches) for _ in self.chunks],
            model=self.chunks,
            num_microbatches=len(micro_batches),
            seq_length=max(micro_batch.input_ids.shape[1] for micro_batch in micro_batches),
            micro_batch_size=1,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )


def sum_over_replicas(sums: Mapping[str, tuple[float, float]]) -> Sums:
    """Metrics added up over the data-parallel ranks, the same on each to the bit. Ranks may lack some. Collective."""
    group = parallel_state.get_data_parallel_group()
    parts: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(parts, dict(sums), group=group)
    return add_up(parts)


@dataclass(frozen=True, slots=True)
class _Prediction:
    """What `_predict` needs beside the hidden states."""

    vocab_size: int
    temperature: float
    with_entropy: bool
    micro_batch: MicroBatch | None = None


def _predict(
    *,
    hidden_states: torch.Tensor,
    output_layer: MegatronModule,
    output_weight: torch.Tensor | None,
    config: TransformerConfig,
    context: _Prediction,
    **unused: Any,
) -> torch.Tensor:
    """Log-probs of the targets, and entropies where asked for: float32 [1 or 2, T].

    Megatron calls it in place of its own output layer. With sequence parallelism, hidden states are gathered here and
    not in the layer, for positions are chosen among all tokens.
    """
    assert context.micro_batch is not None
    group = output_layer.tp_group
    hidden = hidden_states.squeeze(1)
    if config.sequence_parallel:
        hidden = gather_from_sequence_parallel_region(hidden, group=group)
    logits = linear_with_grad_accumulation_and_async_allreduce(
        hidden.index_select(0, context.micro_batch.predicting),
        output_layer.weight if output_weight is None else output_weight,
        output_layer.bias,
        gradient_accumulation_fusion=config.gradient_accumulation_fusion,
        # Gathering the sequence sums the gradient already, where it splits it.
        allreduce_dgrad=dist.get_world_size(group) > 1 and not config.sequence_parallel,
        sequence_parallel=False,
        tp_group=group,
    )
    logprob, entropy = token_logprobs(
        logits,
        context.micro_batch.targets,
        temperature=context.temperature,
        vocab_size=context.vocab_size,
        group=group,
        with_entropy=context.with_entropy,
    )
    return logprob[None] if entropy is None else torch.stack([logprob, entropy])


def _normalized_weights(batch: Batch, objective: Objective) -> Column:
    """Weight of each response token in the loss over all ranks' rows, float32. Collective."""
    weights, share = objective.token_weights(batch) if len(batch) else (Column.ragged([], "float32"), 0.0)
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    normalizer = torch.tensor(share, dtype=torch.float64, device=device)
    dist.all_reduce(normalizer, group=parallel_state.get_data_parallel_group())
    # Where no rank has anything to train on, all weights are 0, and so is the loss.
    divisor = normalizer.item() or 1.0
    return Column((weights.values.astype(np.float64) / divisor).astype(np.float32), weights.offsets)


def _loss_share(
    output: torch.Tensor, *, micro_batch: MicroBatch, batch: Batch, weights: Column, objective: Objective
) -> tuple[torch.Tensor, torch.Tensor, dict[str, tuple[torch.Tensor, torch.Tensor]]]:
    """A micro-batch's part of the loss, in the form that megatron's schedule takes: loss, token count, what to keep."""
    # The weights are divided by the global normalizer: there is nothing left for megatron to divide by.
    nothing = torch.zeros((), dtype=torch.int, device=output.device)
    if len(micro_batch.targets) == 0:
        return output.sum(), nothing, {}

    def on_device(column: Column) -> torch.Tensor:
        return torch.from_numpy(column.take(micro_batch.rows).values).to(output.device)

    loss, metrics = objective(
        ResponseTokens(
            logprob=output[0],
            entropy=output[1] if objective.needs_entropy else None,
            weight=on_device(weights),
            columns={name: on_device(batch[name]) for name in objective.columns},
            row=micro_batch.row,
        )
    )
    return loss, nothing, metrics


def add_up(parts: Iterable[Mapping[str, tuple[float, float]]]) -> Sums:
    """Metrics of several micro-batches, mini-batches or ranks; each may lack some."""
    total: Sums = {}
    for part in parts:
        for name, (added, count) in part.items():
            sum_so_far, count_so_far = total.get(name, (0.0, 0.0))
            total[name] = (sum_so_far + added, count_so_far + count)
    return total
