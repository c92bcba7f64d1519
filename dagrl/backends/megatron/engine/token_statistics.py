"""Log-probs, entropies and likeliest tokens from logits whose vocabulary is split over tensor-parallel ranks.

Computes in float32 for any dtype of logits, in chunks of tokens, without gradients; `logprob` has these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

import torch
import torch.distributed as dist

from dagrl.backends.megatron.engine.teacher_divergence import Teacher, TeacherScores, divergence_scores

CHUNK_ELEMENTS = 2**27
"""Logits processed at a time: 512 MiB in float32."""
_TILE = 128
"""Rows of a tile of matrix products."""
AT_ONCE = 2
"""Chunks of logits in a product, if logits and their gradient are both held."""


class TokenScores(NamedTuple):
    """Statistics of T tokens with a gradient, or the gradient with respect to them."""

    logprob: torch.Tensor
    """Log-prob of each target [T]."""
    entropy: torch.Tensor | None = None
    """Entropy in nats of the distribution [T]."""
    candidates: torch.Tensor | None = None
    """Log-probs of given token ids [T, k]; -inf for ids of -1."""
    divergence: torch.Tensor | None = None
    """Divergence from a teacher's distribution [T]."""

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> TokenScores:
        others = (None if score is None else function(score) for score in self[1:])
        return TokenScores(function(self.logprob), *others)


@dataclass(frozen=True, slots=True)
class Statistics:
    """Statistics of T distributions; float32, or float64 for float64 logits."""

    scores: TokenScores
    log_sum: torch.Tensor
    """Log of the sum of exponentials [T]."""
    square_sum: torch.Tensor | None
    """Sum of the squared probabilities [T]."""
    top_logprob: torch.Tensor | None
    """Log-probs of the likeliest tokens [T, top_k], descending; -inf beyond the vocabulary."""
    top_ids: torch.Tensor | None
    """Their ids, int64 [T, top_k]; -1 beyond the vocabulary."""
    teacher: TeacherScores | None = None


@dataclass(frozen=True, slots=True)
class VocabColumns:
    """A rank's part of the vocabulary, and the statistics over it."""

    width: int
    """Columns of the rank, equally many on each rank of `group`, in rank order."""
    vocab_size: int
    """Tokens; columns from there on, counted over all ranks, are padding."""
    temperature: float | torch.Tensor
    """One for all tokens, or one for each [T]."""
    with_entropy: bool = False
    with_square_sum: bool = False
    top_k: int = 0
    group: dist.ProcessGroup | None = None
    """Ranks that split the vocabulary; None for one."""
    chunk_elements: int = CHUNK_ELEMENTS
    """Logits processed at a time."""

    @property
    def first(self) -> int:
        return self.width * (dist.get_rank(self.group) if self.group else 0)

    @property
    def count(self) -> int:
        """Columns of tokens; the rank's further columns are padding."""
        return min(max(self.vocab_size - self.first, 0), self.width)

    def of(self, part: slice) -> VocabColumns:
        if isinstance(self.temperature, torch.Tensor):
            return replace(self, temperature=self.temperature[part])
        return self

    @property
    def divisor(self) -> float | torch.Tensor:
        return self.temperature[:, None] if isinstance(self.temperature, torch.Tensor) else self.temperature

    def chunks(self, rows: int, *, at_once: int = 1) -> Iterator[slice]:
        """Divide `rows` into parts of at most `at_once` times `chunk_elements`, and of a row at least.

        Parts of more than a tile have a power of two of rows: the tiles of a product with [width, hidden size] then
        occupy nearly all processors of a GPU, where other numbers of rows leave a part of them without work at the end.
        """
        size = max(1, at_once * self.chunk_elements // max(1, self.width))
        if size > _TILE:
            size = 1 << (size.bit_length() - 1)
        for start in range(0, rows, size):
            yield slice(start, min(start + size, rows))

    def known(self, ids: torch.Tensor) -> torch.Tensor:
        return (ids >= 0) & (ids < self.vocab_size)

    def targets_here(self, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Whether each target is one of the rank's columns, and its index, or 0."""
        is_here = (targets >= self.first) & (targets < self.first + self.count)
        return is_here, torch.where(is_here, targets - self.first, 0)


def linear_statistics(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    columns: VocabColumns,
    candidates: torch.Tensor | None = None,
    teacher: Teacher | None = None,
) -> Statistics:
    """`statistics` of ``hidden @ weight.T``, in chunks."""
    return statistics(
        lambda part: hidden[part] @ weight.t(), hidden, targets, columns, candidates, teacher, at_once=AT_ONCE
    )


def statistics(
    logits_of: Callable[[slice], torch.Tensor],
    like: torch.Tensor,
    targets: torch.Tensor,
    columns: VocabColumns,
    candidates: torch.Tensor | None = None,
    teacher: Teacher | None = None,
    *,
    at_once: int = 1,
) -> Statistics:
    """Log-probs of the targets and of `candidates`, the divergence from a `teacher`, and the statistics in `columns`,
    without gradient.

    With x = logits / temperature and p = softmax(x): log p[target] = x[target] - log sum exp(x),
    H = log sum exp(x) - sum p x, and sum p^2 = sum exp(2 x) / (sum exp(x))^2. Each rank shifts by its own maximum, so
    that one pass over the logits suffices; `_join` then combines the ranks.
    """
    wide = torch.promote_types(like.dtype, torch.float32)
    is_here, column = columns.targets_here(targets)
    highest = like.new_full((len(targets),), -torch.inf, dtype=wide)
    sums = like.new_zeros(2 + columns.with_entropy + columns.with_square_sum, len(targets), dtype=wide)
    chosen = None if candidates is None else like.new_zeros(candidates.shape, dtype=wide)
    likeliest = _Likeliest.none(highest, columns.top_k) if columns.top_k else None
    taught = TeacherScores.empty(highest) if teacher is not None else None
    sum_up = compiled(_row_sums)
    # Ranks join the sums of divergences in each chunk, even without columns.
    for part in columns.chunks(len(targets) if columns.count or teacher else 0, at_once=at_once):
        logits, divisor = logits_of(part)[:, : columns.count], columns.of(part).divisor
        if teacher is not None and taught is not None:
            given = teacher.logits_of(part)[:, : columns.count]
            taught.write(part, divergence_scores(logits, given, divisor, teacher.kind, columns.group, compiled))
            if not columns.count:
                continue
        highest[part], sums[:, part] = sum_up(
            logits, column[part], is_here[part], divisor, columns.with_entropy, columns.with_square_sum
        )
        if chosen is not None and candidates is not None:
            are_here, places = columns.targets_here(candidates[part])
            chosen[part] = torch.where(are_here, logits.gather(1, places).to(wide) / divisor, 0.0)
        if likeliest is not None:
            likeliest.take(part, logits, divisor, columns.first)
    highest, sums = _join(highest, sums, columns)
    log_sum = sums[0].log() + highest
    entropy = log_sum - sums[2] / sums[0] - highest if columns.with_entropy else None
    if chosen is not None and candidates is not None:
        if _are_several(columns.group):
            dist.all_reduce(chosen, group=columns.group)
        chosen = torch.where(columns.known(candidates), chosen - log_sum[:, None], -torch.inf)
    if likeliest is not None:
        likeliest = likeliest.over(columns.group)
    return Statistics(
        TokenScores(sums[1] - log_sum, entropy, chosen, taught.divergence if taught else None),
        log_sum,
        sums[-1] / sums[0].square() if columns.with_square_sum else None,
        None if likeliest is None else likeliest.x - log_sum[:, None],
        None if likeliest is None else likeliest.ids,
        taught,
    )


@dataclass(frozen=True, slots=True)
class _Likeliest:
    """The likeliest tokens that were found: x = logits / temperature and ids, [tokens, k]."""

    x: torch.Tensor
    ids: torch.Tensor

    @staticmethod
    def none(like: torch.Tensor, count: int) -> _Likeliest:
        x = like.new_full((len(like), count), -torch.inf)
        return _Likeliest(x, torch.full_like(x, -1, dtype=torch.int64))

    def take(self, part: slice, logits: torch.Tensor, divisor: float | torch.Tensor, first: int) -> None:
        """Find the likeliest tokens in `logits`, which begin with column `first` of the vocabulary."""
        values, places = logits.topk(min(self.x.shape[1], logits.shape[1]), dim=1)
        self.x[part, : values.shape[1]] = values.to(self.x.dtype) / divisor
        self.ids[part, : values.shape[1]] = places + first

    def over(self, group: dist.ProcessGroup | None) -> _Likeliest:
        if not _are_several(group):
            return self
        gathered = []
        for own in (self.x, self.ids):
            parts = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
            dist.all_gather(parts, own, group=group)
            gathered.append(torch.cat(parts, dim=1))
        x, places = gathered[0].topk(self.x.shape[1], dim=1)
        return _Likeliest(x, gathered[1].gather(1, places))


def _are_several(group: dist.ProcessGroup | None) -> bool:
    return group is not None and dist.get_world_size(group) > 1


def _join(highest: torch.Tensor, sums: torch.Tensor, columns: VocabColumns) -> tuple[torch.Tensor, torch.Tensor]:
    """Maximum and sums over all ranks, from each rank's own, which are relative to its own maximum."""
    group = columns.group
    if not _are_several(group):
        return highest, sums
    own = highest.clone()
    dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
    # A rank with only padding has sums of 0 and a maximum of minus infinity.
    lower = torch.where(own.isinf(), 0.0, own - highest)
    factor = lower.exp()
    if columns.with_entropy:
        sums[2] = factor * (sums[2] + lower * sums[0])
    if columns.with_square_sum:
        sums[-1] *= factor.square()
    sums[0] *= factor
    dist.all_reduce(sums, group=group)
    return highest, sums


@cache
def compiled[**Arguments, Result](function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """On a GPU, compile to one kernel that reads the logits once; not on a CPU, where that takes minutes."""
    if not torch.cuda.is_available():
        return function
    compiled = torch.compile(function)

    def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        # Dynamic in the number of rows only: dynamic columns would cost more than the arithmetic.
        for tensor in args:
            if isinstance(tensor, torch.Tensor):
                torch._dynamo.maybe_mark_dynamic(tensor, 0)
        return compiled(*args, **kwargs)

    return call


def _row_sums(
    logits: torch.Tensor,
    column: torch.Tensor,
    is_here: torch.Tensor,
    temperature: float | torch.Tensor,
    with_entropy: bool,
    with_square_sum: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each row's highest x = logits / temperature, [tokens], and its sums, [2 to 4, tokens].

    These are the sum of exponentials, the target's x, and on request the sums of exponential times x and of squared
    exponentials; all but the target's are relative to the highest.
    """
    x = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
    highest = x.amax(1)
    shifted = x - highest[:, None]
    exponential = shifted.exp()
    sums = [exponential.sum(1), torch.where(is_here, x.gather(1, column[:, None]).squeeze(1), 0.0)]
    if with_entropy:
        sums.append((exponential * shifted).sum(1))
    if with_square_sum:
        sums.append(exponential.square().sum(1))
    return highest, torch.stack(sums)
