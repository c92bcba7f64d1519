"""Forward and backward passes of a batch in packed micro-batches.

The schedule of micro-batches is Megatron's, with and without a pipeline; `micro_batch` packs, `output` reads the
model's predictions, and the `Objective` computes a loss. Outputs of the last pipeline stage are broadcast to all.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import tee
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import MegatronModule
from megatron.core.utils import get_model_config

from dagrl.backends.base import Objective, TokenOutputs
from dagrl.backends.megatron.engine.loss import GlobalLoss, LossFunction
from dagrl.backends.megatron.engine.micro_batch import MicroBatch, Packing
from dagrl.backends.megatron.engine.moe_losses import MoeLosses
from dagrl.backends.megatron.engine.output import OutputReader, read
from dagrl.backends.megatron.engine.router_replay import RouterReplay
from dagrl.backends.megatron.engine.teacher_head import TeacherHead
from dagrl.backends.megatron.section import SHORTEST_SHARED
from dagrl.data.batch import Batch, Column
from dagrl.data.stats import Stat
from dagrl.data.tally import read_tallies
from dagrl.model_files.images import ImageSettings

Head = Literal["lm", "value", "reward"]

_VALUES_AT_ONCE = 2**23
"""Values of response tokens in a message between pipeline stages: 32 MiB."""
_ALONE = {"logprob": "logprob", "entropy": "entropy", "prob_square_sum": "square_sum"}
"""Column with a number for each token -> the part of an output that holds it."""

type _Request = tuple[OutputReader, LossFunction | None]
"""A micro-batch, the reader of its output, and the function of the result."""


@dataclass(frozen=True, slots=True)
class _Split:
    rows: list[np.ndarray]
    tokens: list[int]
    micro_batches: Iterable[MicroBatch]
    """To be iterated over once: a micro-batch is packed when the model reaches it, while the device works on earlier
    ones."""


@dataclass(frozen=True, slots=True)
class PackedModel:
    """One rank's part of a model, run on packed micro-batches. Every method is collective."""

    chunks: list[MegatronModule]
    """The model's chunks on this rank; wrapped for data-parallel training if gradients are needed."""
    vocab_size: int
    """Number of tokens; further columns of the output layer are padding."""
    alignment: int
    """Divides the length of every packed row; see `ParallelSpec.row_alignment`."""
    head: Head = "lm"
    fused: bool = False
    """Compute logits by chunk, and again in the backward pass unless the loss is a sum over tokens."""
    replay: RouterReplay | None = None
    """Replays recorded routes, if the batch has ``routed_experts``."""
    vision: ImageSettings | None = None
    shares_prefixes: bool = False
    """Compute prefixes that rows of a micro-batch have in common once; see `prefix_sharing`."""
    teacher: TeacherHead | None = None
    """The teacher's output layer on the last pipeline stage, for `Objective.whole_divergence`."""

    def token_outputs(
        self, batch: Batch, outputs: TokenOutputs, *, temperature: float, tokens_per_micro_batch: int
    ) -> dict[str, Column]:
        """Log-probs of the response tokens and further `outputs`, without gradients; see `TrainEngine`."""
        assert self.head == "lm", f"a {self.head} head has no log-probs"
        reader = OutputReader(
            self.vocab_size,
            temperature,
            with_entropy=outputs.entropy,
            with_square_sum=outputs.square_sum,
            top_k=0 if outputs.at else outputs.top_k,
            candidates=outputs.at,
            hidden_size=get_model_config(self.chunks[0]).hidden_size if outputs.hidden else 0,
            fused=self.fused,
        )
        ids = batch[outputs.at] if outputs.at else None
        # A rank without rows may not know the number of candidates.
        parts = reader.parts(ids.values.shape[1] if ids is not None and ids.values.ndim == 2 else 0)
        rows = max(part.stop for part in parts.values())
        read = self._read(batch, reader, batch["response_tokens"].lengths, tokens_per_micro_batch, rows)
        own = {name: Column(np.ascontiguousarray(read.values[:, part]), read.offsets) for name, part in parts.items()}
        columns = {name: Column(own[part].values[:, 0], read.offsets) for name, part in _ALONE.items() if part in own}
        if outputs.hidden:
            # numpy has no bfloat16.
            states = torch.from_numpy(own["hidden"].values).bfloat16().view(torch.int16).numpy()
            columns["hidden_states"] = Column(states, read.offsets)
        if ids is not None:
            empty = Column(read.values[:, :0], read.offsets)
            return columns | {"topk_ids": ids, "topk_logprob": own.get("candidates", empty)}
        if outputs.top_k:
            top_ids = Column(own["top_ids"].values.astype(np.int32), read.offsets)
            return columns | {"topk_ids": top_ids, "topk_logprob": own["top_logprob"]}
        return columns

    def values(self, batch: Batch, *, tokens_per_micro_batch: int) -> Column:
        """Values of the response tokens, or scores of the rows; see `TrainEngine.values`."""
        assert self.head != "lm", "a language model has no values"
        reader = OutputReader(self.vocab_size, scalar=True)
        if self.head == "value":
            read = self._read(batch, reader, batch["response_tokens"].lengths, tokens_per_micro_batch)
            return Column(read.values[:, 0], read.offsets)
        return Column(self._read(batch, reader, np.ones(len(batch), np.int64), tokens_per_micro_batch).values[:, 0])

    def accumulate_gradient(
        self, batch: Batch, objective: Objective[Any], *, tokens_per_micro_batch: int
    ) -> dict[str, Stat]:
        """Add the gradient of the objective over all ranks' batches to the gradient buffers, and reduce it.

        Returns the data-parallel rank's share of the metrics; see `loss.join_replicas`.
        """
        if self.head == "lm":
            reader = OutputReader(
                self.vocab_size,
                objective.temperature,
                with_entropy=objective.needs_entropy,
                candidates=objective.candidates,
                divergence=objective.whole_divergence,
                teacher=self.teacher,
                fused=self.fused,
            )
        else:
            reader = OutputReader(self.vocab_size, scalar=True)
        whole_groups = "group_id" in objective.columns
        split = self._split(batch, tokens_per_micro_batch, reader, whole_groups=whole_groups)
        losses = MoeLosses(get_model_config(self.chunks[0]))
        loss = GlobalLoss.over_all_ranks(objective, batch, of_values=reader.scalar)
        token_loss = objective.token_loss() if self.fused else None
        # Megatron calls losses there only.
        is_last = parallel_state.is_pipeline_last_stage()

        def requests() -> Iterator[_Request]:
            for micro_batch in split.micro_batches:
                share = loss.of(micro_batch, token_loss) if is_last else None
                slopes_of = share.slopes if share and token_loss else None
                yield replace(reader, micro_batch=micro_batch, slopes_of=slopes_of), share

        with losses.scaled_by(split.tokens):
            metrics = self._run(requests(), split.tokens, forward_only=False)
        return {**_from_last_stage(read_tallies(metrics)), **losses.metrics()}

    def _read(
        self, batch: Batch, reader: OutputReader, lengths: np.ndarray, tokens_per_micro_batch: int, rows: int = 1
    ) -> Column:
        """Outputs of `reader` without gradients, float32 [sum of lengths, rows]: `lengths` places in each row."""
        split = self._split(batch, tokens_per_micro_batch, reader)

        def take(output: torch.Tensor, non_loss_data: bool) -> torch.Tensor:
            # A micro-batch without rows does not know the candidates.
            output = output if output.shape[1] else output.new_empty(rows, 0)
            # Candidates of a whole batch would take much device memory.
            return output.cpu() if rows > 1 else output

        with torch.no_grad():
            requests = ((replace(reader, micro_batch=micro_batch), take) for micro_batch in split.micro_batches)
            values = self._run(requests, split.tokens, forward_only=True)
        total = int(lengths.sum())
        device = "cpu" if rows > 1 else self._device
        joined = torch.cat(values, dim=1) if values else torch.empty(rows, total, device=device)
        _broadcast_from_last_stage(joined, self._device)
        order = np.concatenate(split.rows)
        packed = Column(joined.cpu().numpy().T, np.concatenate([[0], np.cumsum(lengths[order])]))
        return packed.take(np.argsort(order))

    def _split(self, batch: Batch, budget: int, reader: OutputReader, *, whole_groups: bool = False) -> _Split:
        """Micro-batches of this rank; as many as other ranks have, if ranks communicate within the model."""
        packing = Packing(
            self.alignment,
            routes=self.replay.routes_of(batch) if self.replay else None,
            context_rank=parallel_state.get_context_parallel_rank(),
            context_ranks=parallel_state.get_context_parallel_world_size(),
            at_row_end=self.head == "reward",
            candidates=reader.candidates,
            teacher_hidden=reader.divergence.hidden if reader.divergence else None,
            vision=self.vision,
            embeds=parallel_state.is_pipeline_first_stage(),
            shared_prefix=max(SHORTEST_SHARED, 3 * self.alignment) if self.shares_prefixes else None,
        )
        bins = packing.bins(batch, budget, whole_groups=whole_groups)
        count = self._agree_on_count(len(bins))
        if count > len(bins):
            bins = packing.bins(batch, budget, count, whole_groups=whole_groups)
        # A rank with fewer rows runs the model without rows, to take part in collectives.
        bins += [np.arange(0)] * (count - len(bins))
        tokens = self._agree_on_tokens([packing.tokens(batch, rows) for rows in bins])
        micro_batches: Iterable[MicroBatch] = (
            packing.micro_batch(batch, rows, self._device, n) for rows, n in zip(bins, tokens, strict=True)
        )
        if self.replay:
            micro_batches = list(micro_batches)
            self.replay.check(micro_batches)
        return _Split(bins, tokens, micro_batches)

    def _agree_on_count(self, own: int) -> int:
        config = get_model_config(self.chunks[0])
        count = max(own, 1)
        if config.num_moe_experts is not None:
            # Data-parallel ranks share experts and their load statistics.
            most = torch.tensor(count, device=self._device)
            dist.all_reduce(most, op=dist.ReduceOp.MAX, group=parallel_state.get_data_parallel_group())
            count = int(most)
        if len(self.chunks) > 1:
            # The interleaved schedule requires a multiple.
            stages = config.microbatch_group_size_per_vp_stage
            count = -(-count // stages) * stages
        return count

    def _agree_on_tokens(self, own: list[int]) -> list[int]:
        """Tokens of each micro-batch, equal on all ranks if expert-parallel ranks gather them."""
        config = get_model_config(self.chunks[0])
        if config.fp8:
            # Matrix products in fp8 need lengths that are multiples on every rank.
            unit = fp8_tokens(config.fp8_recipe) * config.context_parallel_size * config.tensor_model_parallel_size
            own = [-(-tokens // unit) * unit for tokens in own]
        gathers = config.num_moe_experts is not None and config.moe_token_dispatcher_type == "allgather"
        if not gathers or config.expert_model_parallel_size * config.expert_tensor_parallel_size == 1:
            return own
        most = torch.tensor(own, device=self._device)
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=parallel_state.get_data_parallel_group())
        return most.tolist()

    def _run(self, requests: Iterator[_Request], tokens: Sequence[int], *, forward_only: bool) -> list[Any]:
        """Run the model on each of the `requests`, and apply its function; `tokens` are those of each micro-batch.

        A request is taken when the model reaches it. Returns the results; none before the last pipeline stage.
        """

        def forward(waiting: Iterator[_Request], model: MegatronModule) -> tuple[torch.Tensor, LossFunction | None]:
            reader, ending = next(waiting)
            micro_batch = reader.micro_batch
            assert micro_batch is not None
            if self.replay:
                self.replay.begin(model, micro_batch)
            images = {"images": micro_batch.images} if self.vision else {}
            output = model(
                **images,
                input_ids=micro_batch.input_ids,
                position_ids=micro_batch.position_ids,
                attention_mask=None,
                packed_seq_params=micro_batch.sequences,
                output_processor=read,
                output_processor_context=reader,
            )
            return output, ending

        for chunk in self.chunks:
            chunk.train(not forward_only)
        with self.replay.following(training=not forward_only) if self.replay else nullcontext():
            return get_forward_backward_func()(
                forward_step_func=forward,
                data_iterator=list(tee(requests, len(self.chunks))),
                model=self.chunks,
                num_microbatches=len(tokens),
                # Stages exchange each micro-batch's actual length.
                seq_length=max(tokens),
                micro_batch_size=1,
                forward_only=forward_only,
                collect_non_loss_data=forward_only,
            )

    @property
    def _device(self) -> torch.device:
        return next(self.chunks[0].parameters()).device


def fp8_tokens(recipe: str) -> int:
    """A rank's part of a micro-batch must be a multiple of this number of tokens.

    Transformer Engine gathers blockwise activations in fp8 only if they are whole blocks, and in bfloat16 otherwise.
    """
    return 128 if recipe == "blockwise" else 16


def _from_last_stage(metrics: dict[str, Stat]) -> dict[str, Stat]:
    if parallel_state.get_pipeline_model_parallel_world_size() == 1:
        return metrics
    shared = [metrics]
    last = parallel_state.get_pipeline_model_parallel_last_rank()
    dist.broadcast_object_list(shared, src=last, group=parallel_state.get_pipeline_model_parallel_group())
    return shared[0]


def _broadcast_from_last_stage(values: torch.Tensor, device: torch.device) -> None:
    """Copy `values` [rows, places] from the last stage to all, in parts, by way of `device`."""
    if parallel_state.get_pipeline_model_parallel_world_size() == 1:
        return
    last = parallel_state.get_pipeline_model_parallel_last_rank()
    group = parallel_state.get_pipeline_model_parallel_group()
    for part in values.split(max(1, _VALUES_AT_ONCE // max(1, len(values))), dim=1):
        moved = part.to(device).contiguous()
        dist.broadcast(moved, src=last, group=group)
        part.copy_(moved)
