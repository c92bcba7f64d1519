"""Reads the last layer's output: numbers of response tokens' distributions, or outputs of a scalar head.

Megatron calls these functions in place of its output layer on the last pipeline stage, so that only the positions that
are read go through that layer. `step` runs the model and joins the ranks' outputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    linear_with_grad_accumulation_and_async_allreduce,
)
from megatron.core.transformer import MegatronModule, TransformerConfig
from torch.autograd.function import BackwardCFunction, once_differentiable

from dagrl.backends.megatron.engine.logprob import SlopesOf, linear_loss, linear_token_logprobs, token_logprobs
from dagrl.backends.megatron.engine.micro_batch import MicroBatch
from dagrl.backends.megatron.engine.teacher_divergence import Teacher
from dagrl.backends.megatron.engine.token_statistics import (
    Statistics,
    TokenScores,
    VocabColumns,
    linear_statistics,
    statistics,
)
from dagrl.config.schema.nodes.distillation import WholeDivergence

if TYPE_CHECKING:
    from dagrl.backends.megatron.engine.teacher_head import TeacherHead


@dataclass(frozen=True, slots=True)
class OutputReader:
    """The request of a read; Megatron passes it to `read` with the hidden states of a micro-batch."""

    vocab_size: int
    temperature: float = 1.0
    """The temperature of all rows, unless the micro-batch has one for each."""
    with_entropy: bool = False
    with_square_sum: bool = False
    """Only without gradients."""
    top_k: int = 0
    """Likeliest tokens to find; only without gradients."""
    candidates: str | None = None
    """Column of token ids whose log-probs to read."""
    hidden_size: int = 0
    """Values of a hidden state to return; 0 for none. Only without gradients."""
    divergence: WholeDivergence | None = None
    """Only with gradients, and with a `teacher` on the last pipeline stage."""
    teacher: TeacherHead | None = None
    fused: bool = False
    """Compute logits by chunk; see `linear_token_logprobs`."""
    scalar: bool = False
    """The output layer is a `ScalarHead`."""
    micro_batch: MicroBatch | None = None
    slopes_of: SlopesOf | None = None
    """The gradient of a loss that is a sum over tokens, if `fused`; see `linear_loss`."""

    def parts(self, candidates: int) -> dict[str, slice]:
        """Names of the rows of `read`'s output, for the given number of `candidates` at a token.

        Ids are floats there, which hold those of any vocabulary exactly.
        """
        lengths = {
            "logprob": 1,
            "entropy": int(self.with_entropy),
            "square_sum": int(self.with_square_sum),
            "candidates": candidates if self.candidates else 0,
            "top_logprob": self.top_k,
            "top_ids": self.top_k,
            "divergence": int(self.divergence is not None),
            "hidden": self.hidden_size,
        }
        ends = accumulate(lengths.values())
        return {
            name: slice(end - length, end) for (name, length), end in zip(lengths.items(), ends, strict=True) if length
        }


def read(
    *,
    hidden_states: torch.Tensor,
    output_layer: MegatronModule,
    output_weight: torch.Tensor | None,
    config: TransformerConfig,
    context: OutputReader,
    **unused: object,
) -> torch.Tensor:
    """Float32 [1, R] of scalars, or [C, R] with the rows of `OutputReader.parts`; the same on all tp and cp ranks.

    With `OutputReader.slopes_of` a row follows in which each element is `linear_loss`'s scalar.
    """
    micro_batch = context.micro_batch
    assert micro_batch is not None
    hidden = hidden_states.squeeze(1)
    if config.sequence_parallel:
        # In the backward pass ranks have parts of the gradient of logits, or all the same gradient of scalars.
        hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=not context.scalar)
    hidden = hidden.index_select(0, micro_batch.reading)
    if context.scalar:
        return _join_context(output_layer(hidden).t(), micro_batch)
    # Wait for weights that are being gathered over replicas. Megatron does in a pre-forward hook of the layer, which
    # would not run, because only the layer's weight is used.
    for hook in output_layer._forward_pre_hooks.values():
        hook(output_layer, ())
    weight = output_layer.weight if output_weight is None else output_weight
    rows, carrier = _rows(hidden, weight, config, context, micro_batch)
    if context.hidden_size:
        rows.append(hidden.t().to(rows[0].dtype))
    values = _join_context(torch.cat(rows), micro_batch)
    return values if carrier is None else torch.cat([values, carrier.expand(1, values.shape[1])])


class ScalarHead(torch.nn.Linear):
    """One output per token for critics and reward models; replicated on every tensor-parallel rank.

    The outputs are float32: bfloat16 would lose advantages, which are differences of values.
    """

    def __init__(self, config: TransformerConfig) -> None:
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else None
        super().__init__(config.hidden_size, 1, bias=False, dtype=config.params_dtype, device=device)
        # Megatron's mark of output layers, which some optimizers treat differently.
        self.weight.is_embedding_or_output_parameter = True  # type: ignore[attr-defined]

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states [N, hidden size] to float32 [N, 1]."""
        return torch.nn.functional.linear(hidden.float(), self.weight.float())


def _rows(
    hidden: torch.Tensor, weight: torch.Tensor, config: TransformerConfig, reader: OutputReader, micro_batch: MicroBatch
) -> tuple[list[torch.Tensor], torch.Tensor | None]:
    """The rows of `OutputReader.parts` for the positions that this rank reads, and `linear_loss`'s scalar."""
    group, targets, ids = parallel_state.get_tensor_model_parallel_group(), micro_batch.targets, micro_batch.candidates
    temperature = reader.temperature if micro_batch.temperature is None else micro_batch.temperature
    # Gathering a split sequence sums the gradient already.
    sums_gradient = dist.get_world_size(group) > 1 and not config.sequence_parallel
    # "Gemma 2" (arXiv 2408.00118), section 2.
    cap = getattr(config, "final_logit_softcapping", None)
    columns = VocabColumns(
        weight.shape[0],
        reader.vocab_size,
        temperature,
        with_entropy=reader.with_entropy,
        with_square_sum=reader.with_square_sum,
        top_k=reader.top_k,
        group=group,
    )
    teacher = None
    if reader.divergence is not None and micro_batch.teacher_hidden is not None:
        assert reader.teacher is not None, "the engine was not built with a teacher's output layer"
        teacher = Teacher(reader.teacher.logits_of(micro_batch.teacher_hidden), reader.divergence)
    if reader.fused:
        assert not cap, "logits that are computed by chunk are not capped"
        if not torch.is_grad_enabled():
            return _rows_of(linear_statistics(hidden, weight, targets, columns, ids)), None
        if sums_gradient:
            hidden = copy_to_tensor_model_parallel_region(hidden)
        if reader.slopes_of is not None:
            scores, carrier = linear_loss(hidden, weight, targets, columns, reader.slopes_of, ids, teacher)
            return _rows_of(scores), carrier
        return _rows_of(linear_token_logprobs(hidden, weight, targets, columns, ids, teacher)), None
    logits = linear_with_grad_accumulation_and_async_allreduce(
        hidden,
        weight,
        None,
        gradient_accumulation_fusion=config.gradient_accumulation_fusion,
        allreduce_dgrad=sums_gradient,
        sequence_parallel=False,
        tp_group=group,
    )
    logits = cap * torch.tanh(logits / cap) if cap else logits
    if not torch.is_grad_enabled():
        return _rows_of(statistics(logits.__getitem__, logits, targets, columns, ids)), None
    return _rows_of(token_logprobs(logits, targets, columns, ids, teacher)), None


def _rows_of(results: Statistics | TokenScores) -> list[torch.Tensor]:
    """In the order of `OutputReader.parts`, each [rows, P]."""
    if isinstance(results, Statistics):
        logprob, entropy, candidates, _ = results.scores
        parts = [logprob, entropy, results.square_sum, candidates, results.top_logprob, results.top_ids]
    else:
        logprob, parts = results.logprob, list(results)
    columns = [part if part.ndim == 2 else part[:, None] for part in parts if part is not None]
    return [column.t().to(logprob.dtype) for column in columns]


def _join_context(values: torch.Tensor, micro_batch: MicroBatch) -> torch.Tensor:
    """All R positions, from the P positions that each context-parallel rank read."""
    if micro_batch.own is not None:
        values = _JoinContext.apply(values, micro_batch.own, micro_batch.outputs)
    return values if micro_batch.repeats is None else values.index_select(1, micro_batch.repeats.output)


class _JoinContext(torch.autograd.Function):
    """All-gathers the values of the context-parallel ranks. The backward pass slices the gradient for each rank instead
    of summing it, because parameter gradients are summed over ranks.
    """

    @staticmethod
    def forward(ctx: BackwardCFunction, values: torch.Tensor, own: torch.Tensor, total: int) -> torch.Tensor:
        ctx.save_for_backward(own)
        joined = values.new_zeros(len(values), total)
        joined[:, own] = values
        dist.all_reduce(joined, group=parallel_state.get_context_parallel_group())
        return joined

    @staticmethod
    @once_differentiable
    def backward(ctx: BackwardCFunction, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (own,) = ctx.saved_tensors
        return grad[:, own], None, None
