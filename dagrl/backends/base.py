"""The interface of engines to ops. A worker holds one rank of an engine; calls are made on all ranks in the
same order.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np

from dagrl.config.residency import Residency
from dagrl.config.schema import SamplingSpec
from dagrl.config.schema.nodes.distillation import WholeDivergence
from dagrl.data.batch import Batch, Column
from dagrl.data.stats import Stat

if TYPE_CHECKING:
    import torch

    from dagrl.data.tally import Tallies
    from dagrl.weight_sync.exporter import WeightExporter
    from dagrl.weight_sync.manifest import Bucket
    from dagrl.weight_sync.receiver import Route

NO_WEIGHTS = -1
"""Policy version of an engine without weights: before the first sync, or after they were dropped."""


class EngineLostError(OSError):
    """The processes of an engine have died or do not respond; the engine has to be built again."""


@dataclass(frozen=True, slots=True)
class TokenOutputs:
    """Numbers of each response token's distribution to compute beside its log-prob, and the columns that hold them.

    The distribution is softmax(logits / temperature) over the whole vocabulary.
    """

    top_k: int = 0
    """``topk_ids``, int32 [tokens, top_k], likeliest first, and ``topk_logprob``, float32. Missing ones have ids of -1
    and log-probs of -inf."""
    at: str | None = None
    """Column of the batch with token ids, int32 [tokens, k], which ``topk_ids`` and ``topk_logprob`` then cover
    instead. The log-prob at an id of -1 is -inf."""
    entropy: bool = False
    """``entropy``, in nats."""
    square_sum: bool = False
    """``prob_square_sum``: the sum of squared probabilities."""
    hidden: bool = False
    """``hidden_states``, bit patterns of bfloat16 as int16 [tokens, hidden size]: the input of the output layer."""

    @property
    def further(self) -> tuple[str, ...]:
        """The columns of these outputs, without ``logprob``."""
        candidates = ("topk_ids", "topk_logprob") if self.top_k or self.at else ()
        asked = {"entropy": self.entropy, "prob_square_sum": self.square_sum, "hidden_states": self.hidden}
        return (*candidates, *(name for name, is_asked in asked.items() if is_asked))


@dataclass(frozen=True, slots=True)
class ResponseTokens:
    """Response tokens of one packed micro-batch in row order, the input of an objective. T tokens, S rows."""

    logprob: torch.Tensor
    """Log-prob of each token under the current weights, float32 [T], with gradient."""
    entropy: torch.Tensor | None
    """Entropy of the distribution at each token, float32 [T]; None unless requested."""
    weight: torch.Tensor
    """Weight of each token in the loss, already divided by the global normalizer, float32 [T]."""
    columns: Mapping[str, torch.Tensor]
    """The objective's columns: [T] for values per response token, [T, k] for candidates, [S] for values per sample."""
    row: torch.Tensor
    """Row of each token, int64 [T], in 0..S-1."""
    totals: tuple[float, ...] = ()
    """Totals of `Objective.token_weights` over all ranks."""
    candidate_logprob: torch.Tensor | None = None
    """Log-prob of each of the token ids in the column `Objective.candidates`, float32 [T, k], with gradient; -inf at
    ids of -1. None unless requested."""
    divergence: torch.Tensor | None = None
    """`Objective.whole_divergence` of each token, float32 [T], with gradient; None unless requested."""


@dataclass(frozen=True, slots=True)
class ValueTokens:
    """Outputs of a critic's or reward model's head for one packed micro-batch in row order. S rows.

    A value head has one output per response token; a reward head one per row (R = S).
    """

    value: torch.Tensor
    """Float32 [R], with gradient."""
    weight: torch.Tensor
    """Weight of each output in the loss, already divided by the global normalizer, float32 [R]."""
    columns: Mapping[str, torch.Tensor]
    """The objective's columns: [T] for values per response token, [S] for values per sample."""
    row: torch.Tensor
    """Row of each output, int64 [R], in 0..S-1."""


class Objective[Tokens: (ResponseTokens, ValueTokens)](Protocol):
    """A loss over response tokens or head outputs; it does not depend on micro-batches, packing and ranks.

    A loss over `ValueTokens` needs an engine with a value or reward head.
    """

    columns: tuple[str, ...]
    """Columns it reads in addition to the tokens. With ``group_id``, the rows of a group are consecutive in one
    micro-batch, in the order of the batch."""
    needs_entropy: bool
    candidates: str | None
    """One of `columns` with token ids, int32 [tokens, k], -1 for none: log-probs at these are
    `ResponseTokens.candidate_logprob`. None if it reads no such log-probs."""
    whole_divergence: WholeDivergence | None
    """The divergence to compute as `ResponseTokens.divergence`, from a teacher whose output layer the engine holds."""
    temperature: float
    """Log-probs are of logits / temperature, as in sampling. A column ``temperature`` of the batch, one for each row,
    replaces it."""

    def token_weights(self, batch: Batch) -> tuple[Column, tuple[float, ...]]:
        """Weight of each response token of `batch`, ragged as response_tokens, and the totals of `batch`.

        With a reward head, one weight per row. The engine sums the totals over all ranks; their number is fixed. The
        first is the normalizer, by which the engine divides the weights; the others are returned in
        `ResponseTokens.totals`. `batch` may have no rows.
        """

    def __call__(self, tokens: Tokens) -> tuple[torch.Tensor, Tallies]:
        """The micro-batch's share of the loss (scalar), and metrics as tallies; see `dagrl.data.tally`."""

    def token_loss(self) -> Callable[[Tokens], torch.Tensor] | None:
        """The share of the loss of any tokens (scalar), if a token's loss depends on no other token's outputs.

        The columns that it reads do not depend on the current weights. The sum over parts of a micro-batch has the
        gradient of the micro-batch's share; parts are in row order, and may hold parts of rows. None if tokens depend
        on each other.
        """


class Engine(Protocol):
    """One rank of an engine."""

    policy_version: int
    """Training steps behind the current weights."""

    def sleep(self, residency: Residency) -> SleepReport:
        """Release device memory down to `residency`: gradients, optimizer and caches first, then weights and
        communicators. Collective; nothing may be generating.

        The host keeps contents that no other engine sends again. With weights alone, only `export_weights` may be
        called; asleep, no method.
        """

    def wake(self, residency: Residency) -> None:
        """Restore the contents of `residency`, bit for bit; dropped weights are undefined before the next update.

        Collective.
        """

    def close(self) -> None:
        """Free process groups, memory and files."""


@dataclass(frozen=True, slots=True)
class SleepReport:
    """Result of `sleep` on one rank."""

    freed_gib: float
    """Device memory released."""
    held_gib: float
    """Device memory that the process held before."""


class ScoresTokens(Engine, Protocol):
    """A rank that computes log-probs of given tokens. Ranks of servers are independent."""

    def logprobs(self, batch: Batch, *, temperature: float, tokens_per_micro_batch: int) -> Column:
        """Log-probs of the response tokens of this data-parallel rank's rows, float32, ragged as response_tokens.

        `batch` holds prompt_tokens and response_tokens; it may be empty on some ranks. Logits are divided by
        `temperature`, or by each row's value in a column ``temperature`` of the batch. A server forms batches itself,
        and computes at temperature 1 alone.
        """

    def token_outputs(
        self, batch: Batch, outputs: TokenOutputs, *, temperature: float, tokens_per_micro_batch: int
    ) -> dict[str, Column]:
        """`logprobs` as column ``logprob``, and the further columns of `outputs`, ragged as response_tokens.

        Servers return only likeliest tokens.
        """


class TrainEngine(ScoresTokens, Protocol):
    """A rank that trains and computes log-probs. Every method is collective, unless it says otherwise."""

    def update(
        self,
        mini_batches: Sequence[Batch],
        objective: Objective[Any],
        *,
        tokens_per_micro_batch: int,
        begins: bool = True,
        ends: bool = True,
    ) -> dict[str, Stat]:
        """Take one optimizer step per mini-batch (this data-parallel rank's rows of it, possibly none).

        Returns the objective's metrics over all ranks, grad_norm and lr; the same on each rank. Raises
        FloatingPointError if a gradient is not finite. Counts one policy version per call, or per group of calls of
        which the first `begins` and the last `ends` the step.
        """

    def values(self, batch: Batch, *, tokens_per_micro_batch: int) -> Column:
        """Outputs of a critic's or reward model's head, float32; rows as in `logprobs`.

        A value head gives one value per response token, computed at the preceding token like log-probs; ragged as
        response_tokens. A reward head gives one score per row, computed at its last token; a flat column.
        """

    def start_weights(self) -> AbstractContextManager[None]:
        """Context in which the engine uses its frozen initial weights."""

    def average_weights(self) -> AbstractContextManager[None]:
        """Context in which the engine uses the moving average of its weights."""

    def weight_exporter(self, bucket_bytes: int, *, by_owner: bool = False) -> WeightExporter:
        """An exporter of the weights for all syncs, in buckets of about `bucket_bytes`. Collective.

        Rank 0 owns all buckets. With `by_owner`, ranks that hold different layers or experts own buckets of these, if
        the backend can export them so.
        """

    def export_weights(self, bucket_bytes: int) -> Iterator[Bucket]:
        """The current weights by Hugging Face names, in buckets of about `bucket_bytes`. Collective; buckets are empty
        except on rank 0.
        """

    def save(self, folder: Path, *, asynchronous: bool = False) -> None:
        """Write model, optimizer, learning-rate schedule and RNG to `folder`, all ranks together.

        An asynchronous save copies the state to the host and writes it while the engine works; methods that change the
        state wait for the copy. It is complete when `finish_save` returns True on every rank. A further save waits for
        it.
        """

    def finish_save(self, *, wait: bool) -> bool:
        """Whether the last save, if any, is complete on disk.

        With `wait`, blocks until it is. Not collective and does not use the device, so it may be called on a sleeping
        engine. Raises OSError once if the state could not be written.
        """

    def load(self, folder: Path) -> None:
        """Load a folder written by `save`, in any parallel layout."""


type Conversation = Sequence[Mapping[str, Any]]
"""Messages with role and content, as in chat templates."""


@dataclass(frozen=True, slots=True)
class ModelScores:
    """Scores of a reward model."""

    values: np.ndarray
    """Float32 [conversations]."""
    cut: np.ndarray
    """Whether a conversation was longer than the model's context and lost its beginning, bool."""


class ScoreEngine(Engine, Protocol):
    """A rank that scores text with its own tokenizer; replicas are independent."""

    def scores(self, conversations: Sequence[Conversation], *, tokens_per_micro_batch: int) -> ModelScores:
        """Scores of conversations, rendered by the model's chat template. Raises ValueError if it rejects one."""


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A request for one response."""

    prompt: np.ndarray
    """Token ids, int64; at least one."""
    seed: int
    """Seed of the response, if the engine supports seeds."""
    begun: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    """Tokens of a partial response to continue, int64. They count towards max_new_tokens."""
    limit: int | None = None
    """Most tokens to sample, if fewer than max_new_tokens allows."""
    images: tuple[np.ndarray, ...] = ()
    """Images of the prompt and of `begun`, uint8 [height, width, 3], resized for the model."""
    image_starts: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    """Index in `begun` of the first token of each of its images, which are the last of `images`, int64."""
    turn_start: int = 0
    """Index in `begun` from which stop strings count, the start of the policy's turn."""
    sampling: SamplingSpec | None = None
    """Its own sampling; None for the call's."""

    @property
    def context_key(self) -> Hashable:
        """Equal for requests with the same tokens and images.

        Rows share the memory of equal images, so its address identifies the content.
        """
        return self.prompt.tobytes(), self.begun.tobytes(), tuple(image.ctypes.data for image in self.images)


@dataclass(frozen=True, slots=True)
class Completion:
    """One response, possibly partial."""

    index: int
    """Index of its request in the call."""
    tokens: np.ndarray
    """Tokens sampled in this call including an end token, int64; without those of a partial response."""
    logprobs: np.ndarray
    """Log-prob of each token under logits / temperature, float32: before top-p, top-k and min-p, or after
    them where the backend says so."""
    finish_reason: str
    """``stop``, ``length``, or ``abort`` after `GenerateEngine.abort`."""
    policy_version: int
    """Oldest weight version that sampled any of these tokens."""
    routed_experts: np.ndarray | None = None
    """Experts of each token, int16 [prompt and response tokens - 1, layers, experts per token]; None unless the engine
    records them."""
    versions: np.ndarray | None = None
    """Weight version that sampled each token, int32 [tokens]; None if it is `policy_version` for all."""

    @property
    def token_versions(self) -> np.ndarray:
        """Weight version that sampled each token, int32 [tokens]."""
        return np.full(len(self.tokens), self.policy_version, np.int32) if self.versions is None else self.versions


def not_sampled(tokens: int) -> np.ndarray:
    """The version of tokens that were not sampled, int32 [tokens]."""
    return np.full(tokens, NO_WEIGHTS, dtype=np.int32)


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Numbers of requests for a replica."""

    chunk: int
    """Requests to send together: a batch, if batches are decoded one after the other."""
    max_inflight: int
    """Unfinished requests at which the replica is fully used."""


class GenerateEngine(Engine, Protocol):
    """A rank that samples; replicas are independent."""

    serializes_calls: bool
    """Whether calls of `generate` wait for each other, so that requests should be sent together."""

    @property
    def sampled_tokens(self) -> int:
        """Tokens sampled in all calls since the engine was built, up to date within a second; shows that the engine
        makes progress.
        """

    def request_limits(self, longest: int) -> RequestLimits:
        """Limits for prompts with responses of up to `longest` tokens."""

    def generate(self, requests: Sequence[GenerationRequest], sampling: SamplingSpec) -> Iterator[Completion]:
        """Sample one response per request, yielded as they finish, in any order.

        `sampling` applies to requests without their own. Thread-safe.
        """

    def abort(self) -> None:
        """End all running requests; `generate` yields their partial responses. Thread-safe."""

    def load_weights(self, buckets: Iterator[Bucket], version: int) -> None:
        """Replace all weights. Raises ValueError for unknown, duplicate or missing names."""


class ReceivesWeights(GenerateEngine, Protocol):
    """A `GenerateEngine` whose own processes receive weights directly."""

    def update_weights(self, route: Route, version: int) -> None:
        """Replace all weights by the ones from the senders in `route`, which report failures."""


type AnyEngine = TrainEngine | GenerateEngine | ScoreEngine


@runtime_checkable
class StartsGenerating(Protocol):
    """A `GenerateEngine` that delivers completions from its own thread, so that no other thread waits for them."""

    def start_generating(
        self, requests: Sequence[GenerationRequest], sampling: SamplingSpec, deliver: Callable[[Completion], None]
    ) -> Future[None]:
        """Sample like `generate`, and return at once. Thread-safe.

        `deliver` is called with each completion in a thread of the engine, which it must not block. The future ends
        after the last one, or with the exception of `generate`; cancelling it ends the requests.
        """
