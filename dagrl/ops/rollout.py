"""``rollout``: samples responses to each prompt; a prompt's come out as soon as all of them are there.

What an abort leaves unfinished comes last: with ``partial_rollout``, to be gone on with in a later step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from dagrl.backends.base import GenerateEngine, GenerationRequest
from dagrl.data.batch import Batch, Column
from dagrl.data.stats import Stat
from dagrl.graph.rollouts import leading_rollout, rollouts
from dagrl.ops.base import Context, OpInput, Output
from dagrl.ops.response import Response, columns_of, stored, turn_columns_of
from dagrl.ops.turns.loop import converse
from dagrl.ops.turns.metrics import turn_stats


def rollout(parts: Sequence[OpInput], context: Context) -> Iterator[Output]:
    """Yield each group once all of its responses are there; after an abort, the other groups together.

    All but the sampling is done in the call itself, so that what is asked for first is sampled first.
    """
    batch = Batch.concat([part.batch for part in parts])
    responses = _beginnings(batch["group_id"].values, context)
    _check_lengths(batch, context)
    requests = {
        row: GenerationRequest(
            batch["prompt_tokens"][row], sample_seed(context, int(batch.rows[row])), responses[row].tokens
        )
        for row, response in enumerate(responses)
        if not response.finished
    }
    if context.rollout.multi_turn:
        grown = converse(batch, requests, responses, context)
    else:
        grown = _sampled(requests, responses, context)
    return _groups(batch, responses, requests, grown, context)


def _sampled(
    requests: Mapping[int, GenerationRequest], responses: Sequence[Response], context: Context
) -> Iterator[tuple[int, Response]]:
    """Each requested response, and its place, with what the engine has sampled for it."""
    engine: GenerateEngine = context.engine
    alike = _alike(requests) if context.sampling.temperature == 0 else [[place] for place in requests]
    asked = [requests[place] for place, *_ in alike]
    for completion in engine.generate(asked, context.sampling) if asked else ():
        place, *others = alike[completion.index]
        response = responses[place].gone_on(completion)
        yield place, response
        for other in others:
            # Nothing was sampled for it.
            yield other, replace(response, begun=len(response.tokens))


def _alike(requests: Mapping[int, GenerationRequest]) -> list[list[int]]:
    """Places with the same prompt and beginning: without chance they get the same response, so it is sampled once."""
    places: dict[tuple[bytes, bytes], list[int]] = {}
    for place, request in requests.items():
        places.setdefault((request.prompt.tobytes(), request.begun.tobytes()), []).append(place)
    return list(places.values())


def _groups(
    batch: Batch,
    responses: list[Response],
    requested: Mapping[int, GenerationRequest],
    grown: Iterator[tuple[int, Response]],
    context: Context,
) -> Iterator[Output]:
    """Put the responses that have `grown` into their places, and yield groups as they are complete."""
    groups = batch["group_id"].values
    missing = Counter(groups[[*requested]].tolist() if requested else ())

    def group_of(group: int) -> Output:
        return _output(batch.rows, responses, np.flatnonzero(groups == group), context)

    for group in dict.fromkeys(groups.tolist()):
        if group not in missing:
            yield group_of(group)
    for place, response in grown:
        responses[place] = response
        group = int(groups[place])
        missing[group] -= response.finished
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


def _beginnings(groups: np.ndarray, context: Context) -> list[Response]:
    """What earlier steps have sampled for each row; nothing where it is too old, or there is none."""
    node = context.rollout
    # In the midst of a run newer ones may have come than it was begun on.
    version = max(context.engine.policy_version, context.version)
    responses = [Response(version)] * len(groups)
    for group, begun in context.begun.items():
        for place, row in enumerate(np.flatnonzero(groups == group)):
            response = stored(begun, place)
            if version - response.version > node.partial_rollout_max_age:
                response = Response(version, outdated=True)
            elif node.mask_offpolicy_in_partial_rollout and response.version < version:
                response = replace(response, mask=np.zeros_like(response.mask))
            responses[row] = response
    return responses


def _output(
    rows: np.ndarray,
    responses: Sequence[Response],
    places: np.ndarray,
    context: Context,
    *,
    unfinished: bool = False,
) -> Output:
    """The responses at `places`, with their statistics where they are finished."""
    chosen = [responses[place] for place in places]
    sampled = sum(each.sampled for each in chosen)
    keeps_begun = context.rollout.partial_rollout and not context.validation
    if unfinished:
        columns = _columns(chosen, context) if keeps_begun else {}
        return Output((), rows[places], columns, sampled=sampled, unfinished=True)
    stats = {}
    if context.sampled_by not in (None, leading_rollout(context.pipeline)):
        # Those of the leading one are told by `samples`, which sees those alone that the step takes.
        stats["response_tokens"] = Stat.of([len(each.tokens) for each in chosen])
    if keeps_begun:
        tokens = sum(len(each.tokens) for each in chosen)
        stats["rollout/begun_token_fraction"] = Stat.weighted(tokens - sampled, tokens)
        stats["rollout/outdated_fraction"] = Stat.of([each.outdated for each in chosen])
    if context.rollout.multi_turn:
        stats |= turn_stats(chosen, context.rollout)
    return Output((), rows[places], _columns(chosen, context), stats, sampled=sampled)


def _columns(responses: Sequence[Response], context: Context) -> dict[str, Column]:
    node = context.rollout
    turns = turn_columns_of(responses, rewarded=node.environment is not None) if node.multi_turn else {}
    return columns_of(responses) | turns
