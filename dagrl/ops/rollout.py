"""``rollout``: samples responses to each prompt, and yields each group when it is complete.

After an abort, unfinished groups come last; with ``partial_rollout`` a later step continues them. Conversations whose
server was lost wait in this worker for the next attempt.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from dagrl.backends.base import EngineLostError, GenerationRequest
from dagrl.config.schema import RolloutNode, SamplingSpec
from dagrl.data.batch import Batch, Column
from dagrl.data.image_column import images_at
from dagrl.data.stats import Stat
from dagrl.ops.agents.play import AgentRollouts
from dagrl.ops.agents.rows import agent_columns_of, agent_row, agent_stats
from dagrl.ops.base import Context, OpInput, Output
from dagrl.ops.response import Response, columns_of, counts_of, image_columns_of, stored, turn_columns_of
from dagrl.ops.turns.dialogue import ERROR, TURNS
from dagrl.ops.turns.loop import Conversations


def rollout(parts: Sequence[OpInput], context: Context) -> Iterator[Output]:
    """Yield each group when all of its responses are finished; after an abort, all other groups together.

    Raises EngineLostError after them, if conversations wait for the engine to be built again. Requests are built in the
    call itself, before the first output is requested, so that calls are served in order.
    """
    batch = Batch.concat([part.batch for part in parts])
    samplings = context.sampling_of_rows(batch)
    responses = _beginnings(batch["group_id"].values, context)
    _check_lengths(batch, context)
    requests = {
        row: GenerationRequest(
            batch["prompt_tokens"][row],
            sample_seed(context, int(batch.rows[row])),
            responses[row].tokens,
            images=(*images_at(batch, row), *responses[row].images),
            image_starts=responses[row].image_starts,
            sampling=samplings[row],
        )
        for row, response in enumerate(responses)
        if not response.finished
    }
    if context.rollout.agent is not None:
        grown = AgentRollouts(batch, requests, context).run()
    elif context.rollout.multi_turn:
        grown = Conversations(batch, requests, responses, context).run()
    else:
        grown = _sampled(requests, responses, context)
    return _groups(batch, responses, requests, grown, context)


def _sampled(
    requests: Mapping[int, GenerationRequest], responses: Sequence[Response], context: Context
) -> Iterator[tuple[int, Response]]:
    engine = context.generator
    alike = _deduplicated(requests, context.sampling)
    asked = [requests[place] for place, *_ in alike]
    for completion in engine.generate(asked, context.sampling) if asked else ():
        place, *others = alike[completion.index]
        response = responses[place].extended(completion)
        yield place, response
        for other in others:
            # This output counts no sampled tokens.
            yield other, replace(response, begun=len(response.tokens))


def _deduplicated(requests: Mapping[int, GenerationRequest], usual: SamplingSpec) -> list[list[int]]:
    """Group rows with the same prompt and prefix that are sampled greedily, which gives them the same response."""
    places: dict[Hashable, list[int]] = {}
    for place, request in requests.items():
        sampling = request.sampling or usual
        key = place if sampling.temperature else (request.context_key, sampling)
        places.setdefault(key, []).append(place)
    return list(places.values())


def _groups(
    batch: Batch,
    responses: list[Response],
    requested: Mapping[int, GenerationRequest],
    grown: Iterator[tuple[int, Response]],
    context: Context,
) -> Iterator[Output]:
    """Store the responses in their rows, and yield groups as they become complete."""
    groups = batch["group_id"].values
    missing = Counter(groups[[*requested]].tolist() if requested else ())

    def group_of(group: int) -> Output:
        return _output(batch.rows, responses, np.flatnonzero(groups == group), context)

    for group in dict.fromkeys(groups.tolist()):
        if group in missing:
            continue
        if not context.rollout.multi_turn:
            yield group_of(group)
        else:
            yield _ended_before(batch.rows[groups == group], context.begun[group], context)
    lost: EngineLostError | None = None
    try:
        for place, response in grown:
            responses[place] = response
            group = int(groups[place])
            missing[group] -= response.finished
            if not missing[group]:
                yield group_of(group)
    except EngineLostError as error:
        if not context.rollout.multi_turn:
            raise
        lost = error
    left = np.flatnonzero(np.isin(groups, [group for group, count in missing.items() if count]))
    if len(left):
        yield _output(batch.rows, responses, left, context, unfinished=True)
    if lost is not None:
        raise lost


def _check_lengths(batch: Batch, context: Context) -> None:
    """Raise ValueError for a prompt longer than the node allows. Only prompts of other nodes can be longer."""
    longest = context.rollout.max_prompt_tokens or context.pipeline.data.max_prompt_tokens
    lengths = batch["prompt_tokens"].lengths
    if len(lengths) and lengths.max() > longest:
        raise ValueError(
            f"sample {batch.rows[lengths.argmax()]} brings a prompt of {lengths.max()} tokens to "
            f"`{context.sampled_by}`, more than its max_prompt_tokens, {longest}; raise that, or truncate prompts in "
            "the node that writes them"
        )


def sample_seed(context: Context, row: int) -> int:
    """Seed of one sample, from the run's seed, the step, the row and the rollout; a resumed run draws the same."""
    # SeedSequence rejects negative numbers.
    entropy = [context.pipeline.run.seed % 2**64, context.step, int(context.validation), row]
    leading = context.pipeline.leading_rollout
    if context.sampled_by not in (None, leading):
        # Rollouts that answer each other must not share seeds; the leading one keeps the seeds that it has alone.
        entropy.append(1 + [*context.pipeline.rollouts].index(context.sampled_by))
    return int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0])


def _beginnings(groups: np.ndarray, context: Context) -> list[Response]:
    """Partial responses of earlier steps; empty responses if none exist, or if they are too old."""
    node = context.rollout
    version = context.policy_version
    responses = [Response(version)] * len(groups)
    for group, begun in context.begun.items():
        for place, row in enumerate(np.flatnonzero(groups == group)):
            response = stored(begun, place)
            if version - response.version > node.partial_rollout_max_age:
                response = Response(version, outdated=True)
            elif node.mask_offpolicy_in_partial_rollout:
                response = response.without_older(version)
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
    chosen = [responses[place] for place in places]
    sampled = sum(response.sampled for response in chosen)
    keeps_begun = context.keeps_unfinished
    if unfinished:
        # Tools and environments stay in this process, and so do the tokens.
        columns = _columns(chosen, context) if keeps_begun and not context.rollout.multi_turn else {}
        return Output((), rows[places], columns, counts=counts_of(chosen), sampled=sampled, unfinished=True)
    columns, counts, stats = _columns(chosen, context), counts_of(chosen), {}
    if context.sampled_by not in (None, context.pipeline.leading_rollout):
        # `samples` reports the leading rollout's, only for the rows that the step trains on.
        stats["response_tokens"] = Stat.of([len(response.tokens) for response in chosen])
    if keeps_begun:
        begun = sum(response.begun for response in chosen)
        stats["rollout/begun_token_fraction"] = Stat.weighted(begun, begun + sampled)
        stats["rollout/outdated_fraction"] = Stat.of([response.outdated for response in chosen])
    if context.rollout.agent_spec is not None:
        stats |= agent_stats(chosen)
        chosen = [response for response in chosen if agent_row(response).first]
    if context.rollout.multi_turn:
        stats |= turn_stats(chosen, context.rollout)
    return Output((), rows[places], columns, stats, counts=counts, sampled=sampled)


def turn_stats(responses: Sequence[Response], node: RolloutNode) -> dict[str, Stat]:
    calls = sum(turn.calls for response in responses for turn in response.turns)
    failed = sum(turn.failed_calls for response in responses for turn in response.turns)
    tokens = sum(len(response.tokens) for response in responses)
    stats = {
        "turns": Stat.of([len(response.turns) for response in responses]),
        "turns/out_of_turns_fraction": Stat.of([response.finish_reason == TURNS for response in responses]),
        "turns/observation_token_fraction": Stat.weighted(
            tokens - sum(response.sampled + response.begun for response in responses), tokens
        ),
    }
    if node.has_tools:
        stats["tools/calls_per_response"] = Stat.weighted(calls, len(responses))
        stats["tools/failed_fraction"] = Stat.weighted(failed, calls)
    if node.environment:
        rewards = [sum(turn.reward for turn in response.turns) for response in responses]
        stats["environment/reward"] = Stat.of(rewards)
        stats["failed/environment"] = Stat.of([response.finish_reason == ERROR for response in responses])
    return stats


def _ended_before(rows: np.ndarray, begun: Batch, context: Context) -> Output:
    """A group of several turns that ended in an earlier step, which needed no more groups and has reported its
    statistics.
    """
    columns, mask = dict(begun.columns), begun["response_mask"]
    row_of = np.repeat(np.arange(len(begun)), mask.lengths)

    def count(which: np.ndarray) -> np.ndarray:
        return np.bincount(row_of[which], minlength=len(begun))

    counts = {"sampled": np.zeros_like(mask.lengths), "begun": mask.lengths}
    if context.rollout.agent is not None:
        counts |= {"held": count(mask.values > 0), "agent_failed": (begun["excluded"].values > 0).astype(np.int64)}
    if context.rollout.mask_offpolicy_in_partial_rollout:
        older = begun["token_version"].values < context.policy_version
        columns["response_mask"] = Column(mask.values * ~older, mask.offsets)
        counts["masked"] = count(older & (mask.values > 0))
    tokens = len(begun["response_tokens"].values)
    stats = {"rollout/begun_token_fraction": Stat.weighted(tokens, tokens)}
    return Output((), rows, columns, stats, counts=counts)


def _columns(responses: Sequence[Response], context: Context) -> dict[str, Column]:
    node = context.rollout
    columns = columns_of(responses, by_token=node.writes_token_versions)
    if node.multi_turn:
        columns |= turn_columns_of(responses, rewarded=node.environment is not None)
        if context.pipeline.data.image_key:
            columns |= image_columns_of(responses)
    if node.agent is not None:
        columns |= agent_columns_of(
            responses, several=context.sequences > 1, has_images=bool(context.pipeline.data.image_key)
        )
    return columns
