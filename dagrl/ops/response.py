"""One response as it grows, with the observations between turns; the columns that hold it, and its passages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from dagrl.backends.base import Completion, not_sampled
from dagrl.data.batch import Batch, Column
from dagrl.data.image_column import image_columns, images_at
from dagrl.model_files.end_tokens import end_tokens
from dagrl.ops.base import Context

if TYPE_CHECKING:
    from dagrl.ops.agents.rows import AgentRow

ABORTED = "abort"


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of the policy."""

    begin: int
    """Index of its first token in the response."""
    end: int
    """Index after its last token."""
    reward: float = 0.0
    calls: int = 0
    failed_calls: int = 0
    interrupted: bool = False
    """Whether an abort ended it, so that the next completion continues it."""


@dataclass(frozen=True, slots=True)
class Response:
    """One response, possibly partial."""

    version: int
    """Oldest weight version that sampled any of its tokens."""
    tokens: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    """Int64 [tokens]."""
    logprobs: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.float32))
    """Float32 [tokens]; 0 for tokens that were not sampled, NaN where the engine gave no finite number."""
    mask: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.float32))
    """1 for tokens that are trained on, float32 [tokens]."""
    versions: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int32))
    """Weight version that sampled each token, int32 [tokens]; -1 for tokens that were not sampled."""
    finish_reason: str = ABORTED
    routed_experts: np.ndarray | None = None
    turns: tuple[Turn, ...] = ()
    begun: int = 0
    """Tokens sampled by earlier steps."""
    outdated: bool = False
    """Whether the tokens of earlier steps were too old and were dropped."""
    masked: int = 0
    """Tokens that are masked because older weights have sampled them."""
    counts: Mapping[str, int] | None = None
    """Only in an agent rollout: counts of this row's tokens for the account."""
    agent: AgentRow | None = None
    images: tuple[np.ndarray, ...] = ()
    """Images in observations, uint8 [height, width, 3] each."""
    image_starts: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    """Index in the response of the first token of each image, int64 [images]."""

    @property
    def finished(self) -> bool:
        return self.finish_reason != ABORTED

    @property
    def sampled(self) -> int:
        if self.turns:
            return sum(turn.end - turn.begin for turn in self.turns) - self.begun
        return len(self.tokens) - self.begun

    def extended(self, completion: Completion) -> Response:
        return replace(
            self,
            version=min(self.version, completion.policy_version) if len(self.tokens) else completion.policy_version,
            tokens=np.concatenate([self.tokens, completion.tokens]),
            logprobs=np.concatenate([self.logprobs, _known(completion.logprobs)]),
            mask=np.concatenate([self.mask, np.ones(len(completion.tokens), dtype=np.float32)]),
            versions=np.concatenate([self.versions, completion.token_versions]),
            finish_reason=completion.finish_reason,
            # An engine reports no routes for a request that was aborted before its first token.
            routed_experts=completion.routed_experts if len(completion.tokens) else self.routed_experts,
        )

    @property
    def turn_start(self) -> int:
        """Index of the first token of the turn of the next completion."""
        return self.turns[-1].begin if self.turns and self.turns[-1].interrupted else len(self.tokens)

    def with_turn(self, completion: Completion) -> Response:
        """Append a completion as a turn, or to the turn that an abort interrupted."""
        earlier = self.turns[:-1] if self.turns and self.turns[-1].interrupted else self.turns
        interrupted = completion.finish_reason == ABORTED
        turn = Turn(self.turn_start, len(self.tokens) + len(completion.tokens), interrupted=interrupted)
        return replace(self.extended(completion), turns=(*earlier, turn))

    def continued(self) -> Response:
        return replace(self, begun=self.begun + self.sampled)

    def with_observation(
        self, tokens: np.ndarray, images: Sequence[np.ndarray] = (), starts: np.ndarray | None = None
    ) -> Response:
        """Append an observation, int64 [tokens], after the last turn; `images` begin at `starts` in it."""
        first = np.zeros(0, dtype=np.int64) if starts is None else starts
        return replace(
            self,
            images=(*self.images, *images),
            image_starts=np.concatenate([self.image_starts, len(self.tokens) + first]),
            tokens=np.concatenate([self.tokens, tokens]),
            logprobs=np.concatenate([self.logprobs, np.zeros(len(tokens), dtype=np.float32)]),
            mask=np.concatenate([self.mask, np.zeros(len(tokens), dtype=np.float32)]),
            versions=np.concatenate([self.versions, not_sampled(len(tokens))]),
            finish_reason=ABORTED,
            # The routes do not cover the observation; the next completion reports routes for all tokens.
            routed_experts=None,
        )

    def with_outcome(self, *, reward: float, calls: int = 0, failed_calls: int = 0) -> Response:
        last = replace(self.turns[-1], reward=reward, calls=calls, failed_calls=failed_calls)
        return replace(self, turns=(*self.turns[:-1], last))

    def ended(self, reason: str) -> Response:
        return replace(self, finish_reason=reason)

    def without_older(self, version: int) -> Response:
        """Mask tokens sampled by weights older than `version`."""
        older = self.versions < version
        return replace(self, mask=self.mask * ~older, masked=self.masked + int(np.count_nonzero(self.mask[older])))

    def token_turns(self) -> np.ndarray:
        """Number of each token's turn, from 1; 0 in observations. Int16 [tokens]."""
        numbers = np.zeros(len(self.tokens), dtype=np.int16)
        for number, turn in enumerate(self.turns, 1):
            numbers[turn.begin : turn.end] = number
        return numbers

    def token_rewards(self) -> np.ndarray:
        """Reward of each turn at its last token, 0 elsewhere. Float32 [tokens]."""
        rewards = np.zeros(len(self.tokens), dtype=np.float32)
        for turn in self.turns:
            # An aborted turn may have no token.
            rewards[turn.begin : turn.end][-1:] = turn.reward
        return rewards


def counts_of(responses: Sequence[Response]) -> dict[str, np.ndarray]:
    """The account's counts of responses, int64 [responses] each.

    ``sampled`` in this step; ``begun``, 0 unless tokens of earlier steps are continued; ``outdated``, whether these
    were too old; ``masked``, because older weights sampled them. For an agent also ``held``, tokens in rows;
    ``retried``, tokens of failed attempts; ``agent_failed``.
    """
    counts = [
        {"sampled": response.sampled, "begun": response.begun} if response.counts is None else response.counts
        for response in responses
    ]
    names = dict.fromkeys(name for count in counts for name in count)
    table = {name: [count.get(name, 0) for count in counts] for name in names}
    table |= {
        "outdated": [response.outdated for response in responses],
        "masked": [response.masked for response in responses],
    }
    return {name: np.array(values, dtype=np.int64) for name, values in table.items()}


def _known(logprobs: np.ndarray) -> np.ndarray:
    """Log-probs of a generator, float32 [tokens], with NaN for impossible values, including infinite ones."""
    return np.where(np.isfinite(logprobs), logprobs, np.float32(np.nan))


def columns_of(responses: Sequence[Response], *, by_token: bool = False) -> dict[str, Column]:
    """Columns that every rollout writes; with `by_token`, also the version of each token."""
    columns = {
        "response_tokens": Column.ragged([response.tokens for response in responses], "int64"),
        "response_mask": Column.ragged([response.mask for response in responses], "float32"),
        "rollout_logprob": Column.ragged([response.logprobs for response in responses], "float32"),
        "policy_version": Column(np.array([response.version for response in responses], dtype=np.int64)),
        "finish_reason": Column.text([response.finish_reason for response in responses]),
    }
    if by_token:
        columns["token_version"] = Column.ragged([response.versions for response in responses], "int32")
    routes = [response.routed_experts for response in responses]
    known = next((route for route in routes if route is not None), None)
    if known is not None:
        columns["routed_experts"] = Column.ragged([known[:0] if route is None else route for route in routes], "int16")
    return columns


def turn_columns_of(responses: Sequence[Response], *, rewarded: bool) -> dict[str, Column]:
    """Columns that only a multi-turn rollout writes; `rewarded` adds the columns of turn rewards."""
    columns = {
        "turns": Column(np.array([len(response.turns) for response in responses], dtype=np.int64)),
        "token_turn": Column.ragged([response.token_turns() for response in responses], "int16"),
    }
    if rewarded:
        columns["token_reward"] = Column.ragged([response.token_rewards() for response in responses], "float32")
    return columns


def image_columns_of(responses: Sequence[Response]) -> dict[str, Column]:
    columns = image_columns([response.images for response in responses])
    return {
        "response_pixel_values": columns["pixel_values"],
        "response_image_sizes": columns["image_sizes"],
        "response_image_starts": Column.ragged([response.image_starts for response in responses], "int32"),
    }


def stored(begun: Batch, place: int) -> Response:
    tokens = begun["response_tokens"][place]
    return Response(
        int(begun["policy_version"][place]),
        tokens,
        begun["rollout_logprob"][place],
        begun["response_mask"][place],
        begun["token_version"][place],
        begun["finish_reason"].string(place),
        begun["routed_experts"][place] if "routed_experts" in begun else None,
        begun=len(tokens),
        masked=int(np.count_nonzero(begun["response_mask"][place] == 0)),
        images=tuple(images_at(begun, place, "response_")),
        image_starts=begun["response_image_starts"][place].astype(np.int64)
        if "response_image_starts" in begun
        else np.zeros(0, dtype=np.int64),
    )


@dataclass(frozen=True, slots=True)
class Passage:
    """Consecutive tokens of the policy or of an observation."""

    tokens: np.ndarray
    """Int64."""
    turn: int
    """Number of the policy's turn, from 1; 0 for an observation."""
    reward: float
    """Reward of the turn; 0 if turns are not rewarded."""


def passages(batch: Batch, row: int) -> list[Passage]:
    """Passages of a response in order. `batch` has ``token_turn`` and possibly ``token_reward``."""
    tokens, turns = batch["response_tokens"][row], batch["token_turn"][row]
    rewards = batch["token_reward"][row] if "token_reward" in batch else np.zeros(len(tokens), dtype=np.float32)
    borders = [0, *(np.flatnonzero(np.diff(turns)) + 1).tolist(), len(tokens)]
    return [
        Passage(tokens[begin:end], int(turns[begin]), float(rewards[begin:end].sum()))
        for begin, end in pairwise(borders)
        if begin < end
    ]


def response_text(tokens: np.ndarray, context: Context) -> str:
    """A response without its end token.

    Other special tokens are kept, so that a policy cannot hide them in a right answer.
    """
    ended = len(tokens) and int(tokens[-1]) in _ends(context)
    return context.resources.tokenizer.decode(tokens[:-1] if ended else tokens)


def _ends(context: Context) -> frozenset[int]:
    """Tokens that end a response, for all sources or validation sets."""
    resources, pipeline = context.resources, context.pipeline
    samplings = context.samplings or (context.sampling,)
    named = frozenset(token for sampling in samplings for token in sampling.stop_token_ids)
    if all(sampling.ignore_eos for sampling in samplings):
        return named
    model = pipeline.model_of(context.rollout.engine) if pipeline.rollouts else pipeline.model
    own = resources.once(f"ends of {context.sampled_by}", lambda: end_tokens(model, resources.tokenizer))
    return named | own
