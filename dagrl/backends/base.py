"""What a node may ask of an engine. A worker holds one rank of an engine and calls these methods on all ranks alike."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from dagrl.config.residency import Residency
from dagrl.config.schema import SamplingSpec
from dagrl.data.batch import Batch, Column
from dagrl.data.stats import Stat

if TYPE_CHECKING:
    import torch

    from dagrl.data.tally import Tallies
    from dagrl.weight_sync.exporter import WeightExporter
    from dagrl.weight_sync.manifest import Bucket
    from dagrl.weight_sync.receiver import Route

NO_WEIGHTS = -1
"""Policy version of an engine that waits for its first weights, or whose weights are gone."""


class EngineLostError(OSError):
    """What an engine runs in is gone or says nothing any more, and the engine with it: it has to be built again."""


@dataclass(frozen=True, slots=True)
class ResponseTokens:
    """The response tokens of one packed micro-batch, in row order: what an objective sees. T tokens, S rows."""

    logprob: torch.Tensor
    """Log-prob of each token under the weights being trained, float32 [T], with gradient."""
    entropy: torch.Tensor | None
    """Entropy of the distribution that each token was drawn from, float32 [T]; None unless asked for."""
    weight: torch.Tensor
    """Weight of each token in the loss, divided by the global normalizer already, float32 [T]."""
    columns: Mapping[str, torch.Tensor]
    """The objective's columns: per-response-token ones as [T], per-sample ones as [S]."""
    row: torch.Tensor
    """Row that each token belongs to, int64 [T], in 0..S-1."""
    totals: tuple[float, ...] = ()
    """The totals of `Objective.token_weights` over all ranks."""


@dataclass(frozen=True, slots=True)
class ValueTokens:
    """What a critic's or reward model's head says of one packed micro-batch, in row order. S rows.

    A value head says R numbers, one for each response token, a reward head R = S, one for each row.
    """

    value: torch.Tensor
    """Float32 [R], with gradient."""
    weight: torch.Tensor
    """Weight of each in the loss, divided by the global normalizer already, float32 [R]."""
    columns: Mapping[str, torch.Tensor]
    """The objective's columns: per-response-token ones as [T], per-sample ones as [S]."""
    row: torch.Tensor
    """Row that each value belongs to, int64 [R], in 0..S-1."""


class Objective[Tokens: (ResponseTokens, ValueTokens)](Protocol):
    """A loss over response tokens, or over values. It is the same number whatever the micro-batches, packing and ranks.

    One over `ValueTokens` needs an engine with a value or reward head.
    """

    columns: tuple[str, ...]
    """Columns it reads, beside the tokens. One that reads ``group_id`` compares the rows of a group: they come in one
    micro-batch, one after the other and in the order of the batch."""
    needs_entropy: bool
    temperature: float
    """Log-probs are of logits / temperature, as the tokens were drawn."""

    def token_weights(self, batch: Batch) -> tuple[Column, tuple[float, ...]]:
        """Weight of each response token of `batch`, ragged as response_tokens, and what `batch` adds to totals.

        With a reward head, one weight for each row. The engine sums the totals over all ranks, always equally many of
        them. The first is the normalizer, which it divides the weights by; the others, if there are any, are the
        objective's own, to be found in `ResponseTokens.totals`. `batch` may have no rows.
        """
        ...

    def __call__(self, tokens: Tokens) -> tuple[torch.Tensor, Tallies]:
        """The micro-batch's share of the loss (scalar), and metrics as tallies; see `dagrl.data.tally`."""
        ...


class Engine(Protocol):
    """One rank of an engine."""

    policy_version: int
    """Optimizer steps (pipeline steps) behind the weights that it holds."""

    def close(self) -> None:
        """Free what the rank holds: process groups, memory, files."""
        ...


@dataclass(frozen=True, slots=True)
class SleepReport:
    """What `sleep` did on one rank."""

    freed_gib: float
    """Device memory given back."""
    held_gib: float
    """Device memory that the process held before."""


class TrainEngine(Engine, Protocol):
    """A rank that computes log-probs and trains. Every method is collective: all ranks call it in the same order."""

    def logprobs(self, batch: Batch, *, temperature: float, tokens_per_micro_batch: int) -> Column:
        """Log-probs of the response tokens of this data-parallel rank's rows, float32, ragged as response_tokens.

        `batch` holds prompt_tokens and response_tokens; it may be empty on some ranks.
        """
        ...

    def update(
        self,
        mini_batches: Sequence[Batch],
        objective: Objective[Any],
        *,
        tokens_per_micro_batch: int,
        begins: bool = True,
        ends: bool = True,
    ) -> dict[str, Stat]:
        """One optimizer step for each mini-batch (this data-parallel rank's rows of it, maybe none).

        Returns the objective's metrics over all ranks, and grad_norm and lr; the same on each rank. Raises
        FloatingPointError where the gradient is not finite. Counts one policy version for the whole call, or for the
        calls that together are a step: the first `begins` it, the last `ends` it.
        """
        ...

    def values(self, batch: Batch, *, tokens_per_micro_batch: int) -> Column:
        """What the head of a critic or reward model says, float32; rows as in `logprobs`.

        A value head gives one value for each response token, read at the token before it as log-probs are; ragged as
        response_tokens. A reward head gives one score for each row, read at its last token; a flat column.
        """
        ...

    def sleep(self, residency: Residency = Residency.ASLEEP) -> SleepReport:
        """Give the device's memory back, down to `residency`: gradients, optimizer and caches, then weights and
        communicators too. What matters waits on the host.

        With the weights alone there, nothing but `export_weights` may be asked of the engine; asleep, nothing at all.
        """
        ...

    def wake(self, residency: Residency = Residency.AWAKE) -> None:
        """Bring back what `sleep` took away, as far as `residency`, to the bit."""
        ...

    def start_weights(self) -> AbstractContextManager[None]:
        """Within the context the engine computes with the frozen weights it started from."""
        ...

    def weight_exporter(self, bucket_bytes: int) -> WeightExporter:
        """Gives out the weights, now and at every later sync, in buckets of about `bucket_bytes`. Collective."""
        ...

    def export_weights(self, bucket_bytes: int) -> Iterator[Bucket]:
        """The current weights by Hugging Face names, in buckets of about that size. Collective; only rank 0's
        buckets hold tensors, the others' are empty.
        """
        ...

    def save(self, folder: Path, *, asynchronous: bool = False) -> None:
        """Write model, optimizer, learning-rate schedule and RNG to `folder`, all ranks together.

        An asynchronous save returns when the state is copied to the host; training may go on. It counts once
        `finish_save` has said so on every rank. One may be under way at a time: a further save waits for it.
        """
        ...

    def finish_save(self, *, wait: bool) -> bool:
        """Whether no save is under way any more: the last one, if there was one, is whole on the disk.

        With `wait`, returns when that is so. Not collective, and without use of the device, so that an engine that
        sleeps can be asked. OSError, once, where the state could not be written.
        """
        ...

    def load(self, folder: Path) -> None:
        """Bring back what `save` wrote, also in another parallel layout."""
        ...


type Conversation = Sequence[Mapping[str, Any]]
"""Messages with a role and a content each, as chat templates take them."""


@dataclass(frozen=True, slots=True)
class ModelScores:
    """What a reward model says of some conversations."""

    values: np.ndarray
    """Float32 [conversations]."""
    cut: np.ndarray
    """Whether a conversation was longer than the model can read, so that its beginning is left out, bool."""


class ScoreEngine(Engine, Protocol):
    """A rank that scores text with a tokenizer of its own: replicas are independent of each other."""

    def scores(self, conversations: Sequence[Conversation], *, tokens_per_micro_batch: int) -> ModelScores:
        """The score of each conversation, by the model's own chat template. ValueError where that cannot take one."""
        ...

    def sleep(self, residency: Residency) -> SleepReport:
        """Give device memory back, down to `residency`; the weights wait on the host."""
        ...

    def wake(self, residency: Residency) -> None:
        """Bring back what is needed for `residency`."""
        ...


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One response to be sampled."""

    prompt: np.ndarray
    """Token ids, int64; at least one."""
    seed: int
    """Source of the response's randomness, where the engine can be seeded."""
    begun: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    """Tokens of the response that are there already, int64: it goes on behind them. They count in max_new_tokens."""


@dataclass(frozen=True, slots=True)
class Completion:
    """One response, or as much of it as there is."""

    index: int
    """Place of its request in the call."""
    tokens: np.ndarray
    """Tokens sampled in this call, the one that ended it included, int64; without those that were begun."""
    logprobs: np.ndarray
    """Log-prob of each under logits / temperature, before top-p and top-k, float32."""
    finish_reason: str
    """``stop``, ``length``, or ``abort`` where `GenerateEngine.abort` came first."""
    policy_version: int
    """Version of the oldest weights that sampled any of these tokens."""
    routed_experts: np.ndarray | None = None
    """Experts that each token went to, int16 [prompt and response tokens - 1, layers, experts per token]; None unless
    the engine was built to tell them."""


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """How many responses a replica wants at a time."""

    chunk: int
    """Handed over together: a batch, where batches are decoded one after the other."""
    max_inflight: int
    """Handed over and not finished yet, so that it never waits for more."""


class GenerateEngine(Engine, Protocol):
    """A rank that samples: replicas are independent of each other."""

    takes_turns: bool
    """Whether calls of `generate` wait for each other, so that requests are better handed over together."""
    sampled_tokens: int
    """Tokens sampled since the engine was built, in all calls, seldom a second behind: that they grow is how others
    know that it is at work."""

    def request_limits(self, longest: int) -> RequestLimits:
        """How many responses it wants, where prompt and response together have up to `longest` tokens."""
        ...

    def generate(self, requests: Sequence[GenerationRequest], sampling: SamplingSpec) -> Iterator[Completion]:
        """Sample a response to each request, yielded as they finish, in any order.

        Several calls may run at once, each in a thread of its own.
        """
        ...

    def abort(self) -> None:
        """End all that is being generated now: what is unfinished comes out of `generate` as it is. From any thread."""
        ...

    def load_weights(self, buckets: Iterator[Bucket], version: int) -> None:
        """Replace all weights. ValueError where a name is unknown, doubled or missing."""
        ...

    def update_weights(self, route: Route, version: int) -> None:
        """Replace all weights by those that the senders of `route` have, who say what goes wrong with that.

        Only of engines with processes of their own, that weights can reach without going through this one.
        """
        ...

    def sleep(self, residency: Residency) -> SleepReport:
        """Give device memory back, down to `residency`. Nothing may be in generation.

        Asleep, an engine that follows another has no weights any more; one that follows none keeps its own.
        """
        ...

    def wake(self, residency: Residency) -> None:
        """Bring back what is needed for `residency`; weights that had gone are of no use before `load_weights`."""
        ...
