"""``rollout``: samples responses to each prompt; a prompt's come out as soon as all of them are there.

What an abort leaves unfinished comes last: with ``partial_rollout``, to be gone on with in a later step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from dagrl.data.batch import Batch, Column
from dagrl.data.stats import Stat
from dagrl.engines.base import Completion, GenerateEngine, GenerationRequest
from dagrl.nodes.base import Context, Output, Part
from dagrl.spec.rollouts import leading_rollout, rollouts

_ABORTED = "abort"


@dataclass(frozen=True, slots=True)
class _Response:
    """One response, or as much of it as there is."""

    version: int
    """Of the oldest weights that sampled any of its tokens."""
    tokens: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    """Int64 [tokens]."""
    logprobs: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.float32))
    """Float32 [tokens]."""
    mask: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.float32))
    """1 where a token is trained on, float32 [tokens]."""
    finish_reason: str = _ABORTED
    routed_experts: np.ndarray | None = None
    begun: int = 0
    """Tokens that earlier steps have sampled."""
    outdated: bool = False
    """Whether what earlier steps had sampled was too old."""

    @property
    def finished(self) -> bool:
        """Whether it has come to its end."""
        return self.finish_reason != _ABORTED

    def gone_on(self, completion: Completion) -> _Response:
        """With what was sampled behind it."""
        return _Response(
            min(self.version, completion.policy_version) if len(self.tokens) else completion.policy_version,
            np.concatenate([self.tokens, completion.tokens]),
            np.concatenate([self.logprobs, completion.logprobs]),
            np.concatenate([self.mask, np.ones(len(completion.tokens), dtype=np.float32)]),
            completion.finish_reason,
            completion.routed_experts,
            self.begun,
            self.outdated,
        )


def rollout(parts: Sequence[Part], context: Context) -> Iterator[Output]:
    """Yield each group once all of its responses are there; after an abort, the other groups together.

    All but the sampling is done in the call itself, so that what is asked for first is sampled first.
    """
    batch = Batch.concat([part.batch for part in parts])
    responses = _beginnings(batch["group_id"].values, context)
    _check_lengths(batch, context)
    going = [row for row, response in enumerate(responses) if not response.finished]
    requests = [
        GenerationRequest(
            batch["prompt_tokens"][row], sample_seed(context, int(batch.rows[row])), responses[row].tokens
        )
        for row in going
    ]
    return _sampled(batch, responses, going, requests, context)


def _sampled(
    batch: Batch,
    responses: list[_Response],
    going: Sequence[int],
    requests: Sequence[GenerationRequest],
    context: Context,
) -> Iterator[Output]:
    """Sample the `requests` for the rows `going`; what there is of all rows so far is `responses`."""
    engine: GenerateEngine = context.engine
    groups = batch["group_id"].values
    missing = Counter(groups[going].tolist())

    def group_of(group: int) -> Output:
        return _output(batch.rows, responses, np.flatnonzero(groups == group), context)

    for group in dict.fromkeys(groups.tolist()):
        if group not in missing:
            yield group_of(group)
    for completion in engine.generate(requests, context.sampling) if requests else ():
        row = going[completion.index]
        responses[row] = responses[row].gone_on(completion)
        group = int(groups[row])
        missing[group] -= responses[row].finished
        if not missing[group]:
            yield group_of(group)
    left = np.flatnonzero(np.isin(groups, [group for group, count in missing.items() if count]))
    if len(left):
        yield _output(batch.rows, responses, left, context, unfinished=True)


def _check_lengths(batch: Batch, context: Context) -> None:
    """ValueError for a prompt that nobody has made room for; those of the data set are never too long."""
    longest = context.rollout.max_prompt_tokens or context.pipeline.data.max_prompt_tokens
    lengths = batch["prompt_tokens"].lengths
    if len(lengths) and lengths.max() > longest:
        raise ValueError(
            f"a prompt of {lengths.max()} tokens has come to `{context.sampled_by}` (sample "
            f"{batch.rows[lengths.argmax()]}), more than its max_prompt_tokens, {longest}; raise that, or let the node "
            "that writes the prompts cut them"
        )


def sample_seed(context: Context, row: int) -> int:
    """Seed of one sample, so that a resumed run draws the same: from the run's seed, the step, the row, the rollout."""
    # A seed may be negative, numpy's sources of randomness take none such.
    entropy = [context.pipeline.run.seed % 2**64, context.step, int(context.validation), row]
    leading = leading_rollout(context.pipeline)
    if context.sampled_by not in (None, leading):
        # Agents that answer each other must not draw alike; the leading one draws as it would alone.
        entropy.append(1 + [*rollouts(context.pipeline)].index(context.sampled_by))
    return int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0])


def _beginnings(groups: np.ndarray, context: Context) -> list[_Response]:
    """What earlier steps have sampled for each row; nothing where it is too old, or there is none."""
    node, version = context.rollout, context.engine.policy_version
    responses = [_Response(version)] * len(groups)
    for group, begun in context.begun.items():
        for place, row in enumerate(np.flatnonzero(groups == group)):
            response = _stored(begun, place)
            if version - response.version > node.partial_rollout_max_age:
                response = _Response(version, outdated=True)
            elif node.mask_offpolicy_in_partial_rollout and response.version < version:
                response = replace(response, mask=np.zeros_like(response.mask))
            responses[row] = response
    return responses


def _output(
    rows: np.ndarray,
    responses: Sequence[_Response],
    places: np.ndarray,
    context: Context,
    *,
    unfinished: bool = False,
) -> Output:
    """The responses at `places`, with their statistics where they are finished."""
    chosen = [responses[place] for place in places]
    sampled = sum(len(each.tokens) - each.begun for each in chosen)
    keeps_begun = context.rollout.partial_rollout and not context.validation
    if unfinished:
        columns = _columns(chosen) if keeps_begun else {}
        return Output((), rows[places], columns, sampled=sampled, unfinished=True)
    stats = {}
    if context.sampled_by not in (None, leading_rollout(context.pipeline)):
        # Those of the leading one are told by `samples`, which sees those alone that the step takes.
        stats["response_tokens"] = Stat.of([len(each.tokens) for each in chosen])
    if keeps_begun:
        tokens = sum(len(each.tokens) for each in chosen)
        stats["rollout/begun_token_fraction"] = Stat.weighted(tokens - sampled, tokens)
        stats["rollout/outdated_fraction"] = Stat.of([each.outdated for each in chosen])
    return Output((), rows[places], _columns(chosen), stats, sampled=sampled)


def _columns(responses: Sequence[_Response]) -> dict[str, Column]:
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


def _stored(begun: Batch, place: int) -> _Response:
    """The response at a place of what an earlier step has published of a group."""
    tokens = begun["response_tokens"][place]
    return _Response(
        int(begun["policy_version"][place]),
        tokens,
        begun["rollout_logprob"][place],
        begun["response_mask"][place],
        bytes(begun["finish_reason"][place]).decode(),
        begun["routed_experts"][place] if "routed_experts" in begun else None,
        begun=len(tokens),
    )
