"""One response as it grows: sampled tokens, and in a rollout of several turns what others have said in between."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from dagrl.backends.base import Completion
from dagrl.data.batch import Batch, Column

ABORTED = "abort"
"""Finish reason of what has not come to its end, or not yet."""


@dataclass(frozen=True, slots=True)
class Turn:
    """What the policy has said in one go, and what came of it."""

    begin: int
    """Place of its first token in the response."""
    end: int
    """Place behind its last one."""
    reward: float = 0.0
    calls: int = 0
    """Tools that it has called."""
    failed_calls: int = 0


@dataclass(frozen=True, slots=True)
class Response:
    """One response, or as much of it as there is."""

    version: int
    """Of the oldest weights that sampled any of its tokens."""
    tokens: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    """Int64 [tokens]."""
    logprobs: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.float32))
    """Float32 [tokens]; 0 where the policy did not say it."""
    mask: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.float32))
    """1 where a token is trained on, float32 [tokens]."""
    finish_reason: str = ABORTED
    routed_experts: np.ndarray | None = None
    turns: tuple[Turn, ...] = ()
    """In a rollout of several turns, those that there are."""
    begun: int = 0
    """Tokens that earlier steps have sampled."""
    outdated: bool = False
    """Whether what earlier steps had sampled was too old."""

    @property
    def finished(self) -> bool:
        """Whether it has come to its end."""
        return self.finish_reason != ABORTED

    @property
    def sampled(self) -> int:
        """Tokens that this step has sampled for it."""
        if self.turns:
            return sum(turn.end - turn.begin for turn in self.turns)
        return len(self.tokens) - self.begun

    def gone_on(self, completion: Completion) -> Response:
        """With what was sampled behind it."""
        return replace(
            self,
            version=min(self.version, completion.policy_version) if len(self.tokens) else completion.policy_version,
            tokens=np.concatenate([self.tokens, completion.tokens]),
            logprobs=np.concatenate([self.logprobs, completion.logprobs]),
            mask=np.concatenate([self.mask, np.ones(len(completion.tokens), dtype=np.float32)]),
            finish_reason=completion.finish_reason,
            # Of a request that was ended before its first token nobody tells.
            routed_experts=completion.routed_experts if len(completion.tokens) else self.routed_experts,
        )

    def spoken(self, completion: Completion) -> Response:
        """With one turn more."""
        turn = Turn(len(self.tokens), len(self.tokens) + len(completion.tokens))
        return replace(self.gone_on(completion), turns=(*self.turns, turn))

    def answered(self, tokens: np.ndarray) -> Response:
        """With an observation behind its last turn, int64 [tokens]: it is to go on."""
        return replace(
            self,
            tokens=np.concatenate([self.tokens, tokens]),
            logprobs=np.concatenate([self.logprobs, np.zeros(len(tokens), dtype=np.float32)]),
            mask=np.concatenate([self.mask, np.zeros(len(tokens), dtype=np.float32)]),
            finish_reason=ABORTED,
            # They do not reach that far; whoever goes on behind it tells of all.
            routed_experts=None,
        )

    def settled(self, *, reward: float, calls: int = 0, failed_calls: int = 0) -> Response:
        """With what came of its last turn."""
        last = replace(self.turns[-1], reward=reward, calls=calls, failed_calls=failed_calls)
        return replace(self, turns=(*self.turns[:-1], last))

    def ended(self, reason: str) -> Response:
        """At its end."""
        return replace(self, finish_reason=reason)

    def token_turns(self) -> np.ndarray:
        """Number of the turn that the policy has said a token in, from 1 on; 0 in observations. Int16 [tokens]."""
        numbers = np.zeros(len(self.tokens), dtype=np.int16)
        for number, turn in enumerate(self.turns, 1):
            numbers[turn.begin : turn.end] = number
        return numbers

    def token_rewards(self) -> np.ndarray:
        """The reward of each turn at its last token, 0 elsewhere. Float32 [tokens]."""
        rewards = np.zeros(len(self.tokens), dtype=np.float32)
        for turn in self.turns:
            # At most one token, and none where an abort came before the first.
            rewards[turn.begin : turn.end][-1:] = turn.reward
        return rewards


def columns_of(responses: Sequence[Response]) -> dict[str, Column]:
    """The columns of every rollout."""
    columns = {
        "response_tokens": Column.ragged([each.tokens for each in responses], "int64"),
        "response_mask": Column.ragged([each.mask for each in responses], "float32"),
        "rollout_logprob": Column.ragged([each.logprobs for each in responses], "float32"),
        "policy_version": Column(np.array([each.version for each in responses], dtype=np.int64)),
        "finish_reason": Column.text([each.finish_reason for each in responses]),
    }
    routes = [each.routed_experts for each in responses]
    known = next((each for each in routes if each is not None), None)
    if known is not None:
        columns["routed_experts"] = Column.ragged([known[:0] if each is None else each for each in routes], "int16")
    return columns


def turn_columns_of(responses: Sequence[Response], *, rewarded: bool) -> dict[str, Column]:
    """The further columns of a rollout of several turns; those of rewards only where somebody gives any."""
    columns = {
        "turns": Column(np.array([len(each.turns) for each in responses], dtype=np.int64)),
        "token_turn": Column.ragged([each.token_turns() for each in responses], "int16"),
    }
    if rewarded:
        columns["token_reward"] = Column.ragged([each.token_rewards() for each in responses], "float32")
    return columns


def stored(begun: Batch, place: int) -> Response:
    """The response at a place of what an earlier step has published of a group."""
    tokens = begun["response_tokens"][place]
    return Response(
        int(begun["policy_version"][place]),
        tokens,
        begun["rollout_logprob"][place],
        begun["response_mask"][place],
        bytes(begun["finish_reason"][place]).decode(),
        begun["routed_experts"][place] if "routed_experts" in begun else None,
        begun=len(tokens),
    )
