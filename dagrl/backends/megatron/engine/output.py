"""Reads the last layer's output: log-probs of response tokens, or outputs of a critic's or reward model's head.

Megatron calls these functions in place of its output layer on the last pipeline stage, so that only the positions that
are read go through that layer. `step` runs the model and joins the ranks' outputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    linear_with_grad_accumulation_and_async_allreduce,
)
from megatron.core.transformer import MegatronModule, TransformerConfig
from torch.autograd.function import once_differentiable

from dagrl.backends.megatron.engine.linear_loss import SlopesOf, linear_loss
from dagrl.backends.megatron.engine.logprob import VocabColumns, linear_token_logprobs, token_logprobs
from dagrl.backends.megatron.engine.micro_batch import MicroBatch


@dataclass(frozen=True, slots=True)
class OutputReader:
    """The request of a read; Megatron passes it to `read` with the hidden states of a micro-batch."""

    vocab_size: int
    temperature: float = 1.0
    """The temperature of all rows, unless the micro-batch has one for each."""
    with_entropy: bool = False
    fused: bool = False
    """Compute logits by chunk; see `linear_token_logprobs`."""
    scalar: bool = False
    """The output layer is a `ScalarHead`."""
    micro_batch: MicroBatch | None = None
    slopes_of: SlopesOf | None = None
    """The gradient of a loss that is a sum over tokens, if `fused`; see `linear_loss`."""


def read(
    *,
    hidden_states: torch.Tensor,
    output_layer: MegatronModule,
    output_weight: torch.Tensor | None,
    config: TransformerConfig,
    context: OutputReader,
    **unused: Any,
) -> torch.Tensor:
    """Float32 [1, R] of log-probs or scalars, or [2, R] of log-probs and entropies; the same on all tp and cp ranks.

    With `OutputReader.slopes_of` a row follows in which each element is `linear_loss`'s scalar.

    With sequence parallelism hidden states are gathered here and not in the layer, because positions are selected among
    all of the rank's tokens.
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
    logprob, entropy, carrier = _logprobs(hidden, weight, config, context, micro_batch)
    values = _join_context(logprob[None] if entropy is None else torch.stack([logprob, entropy]), micro_batch)
    return values if carrier is None else torch.cat([values, carrier.expand(1, values.shape[1])])


class ScalarHead(torch.nn.Linear):
    """One output per token for critics and reward models; replicated on every tensor-parallel rank.

    The weight has the model's dtype, the outputs are float32: in bfloat16, rounding would lose advantages, which are
    differences of values, and the order of scores.
    """

    def __init__(self, config: TransformerConfig) -> None:
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else None
        super().__init__(config.hidden_size, 1, bias=False, dtype=config.params_dtype, device=device)
        # Megatron's mark of output layers, which some optimizers treat differently.
        self.weight.is_embedding_or_output_parameter = True  # type: ignore[attr-defined]

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states [N, hidden size] to float32 [N, 1]."""
        return torch.nn.functional.linear(hidden.float(), self.weight.float())


def _logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    config: TransformerConfig,
    reader: OutputReader,
    micro_batch: MicroBatch,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    group, targets = parallel_state.get_tensor_model_parallel_group(), micro_batch.targets
    temperature = reader.temperature if micro_batch.temperature is None else micro_batch.temperature
    # Gathering a split sequence sums the gradient already.
    sums_gradient = dist.get_world_size(group) > 1 and not config.sequence_parallel
    # "Gemma 2" (arXiv 2408.00118), section 2.
    cap = getattr(config, "final_logit_softcapping", None)
    columns = VocabColumns(weight.shape[0], reader.vocab_size, temperature, reader.with_entropy, group)
    if reader.fused:
        assert not cap, "logits that are computed by chunk are not capped"
        if sums_gradient:
            hidden = copy_to_tensor_model_parallel_region(hidden)
        if reader.slopes_of is not None:
            return linear_loss(hidden, weight, targets, columns, reader.slopes_of)
        return *linear_token_logprobs(hidden, weight, targets, columns), None
    logits = linear_with_grad_accumulation_and_async_allreduce(
        hidden,
        weight,
        None,
        gradient_accumulation_fusion=config.gradient_accumulation_fusion,
        allreduce_dgrad=sums_gradient,
        sequence_parallel=False,
        tp_group=group,
    )
    return *token_logprobs(cap * torch.tanh(logits / cap) if cap else logits, targets, columns), None


def _join_context(values: torch.Tensor, micro_batch: MicroBatch) -> torch.Tensor:
    """All R positions, from the P that each context-parallel rank has read."""
    if micro_batch.own is not None:
        values = _JoinContext.apply(values, micro_batch.own, micro_batch.outputs)
    return values if micro_batch.repeats is None else values.index_select(1, micro_batch.repeats.output)


class _JoinContext(torch.autograd.Function):
    """All ranks get all values and compute the same loss; each gets the gradient of its own values only.

    Parameter gradients are summed over context-parallel ranks, which gives the gradient of one loss.
    """

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, own: torch.Tensor, total: int) -> torch.Tensor:
        ctx.save_for_backward(own)
        joined = values.new_zeros(len(values), total)
        joined[:, own] = values
        dist.all_reduce(joined, group=parallel_state.get_context_parallel_group())
        return joined

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (own,) = ctx.saved_tensors
        return grad[:, own], None, None
