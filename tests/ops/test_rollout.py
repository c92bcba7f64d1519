"""Rollout: streams groups as they are complete, and goes on with what an abort has left."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from work import changed

from dagrl.backends.base import Completion, GenerationRequest
from dagrl.config.schema import SamplingSpec
from dagrl.data.batch import Batch, Column
from dagrl.ops.base import OpInput, Output
from dagrl.ops.rollout import rollout, sample_seed
from dagrl.ops.work import PendingWeights


class Generator:
    """Says each prompt's tokens and one more, 7; finishes requests in a given order, the first `answers` of them.

    Of the others it says the first token alone, as after an abort. What was begun it does not say again.
    """

    def __init__(
        self, order: Sequence[int] | None = None, *, answers: int | None = None, version: int = 5, routes: bool = False
    ) -> None:
        self.order, self.answers, self.policy_version, self.routes = order, answers, version, routes
        self.finished: list[int] = []
        self.seeds: list[int] = []

    def generate(self, requests: Sequence[GenerationRequest], sampling: SamplingSpec) -> Iterator[Completion]:
        self.seeds, self.sampling = [request.seed for request in requests], sampling
        order = range(len(requests)) if self.order is None else [each for each in self.order if each < len(requests)]
        for count, index in enumerate(order):
            request = requests[index]
            whole = np.array([*request.prompt, 7])[len(request.begun) :]
            aborted = self.answers is not None and count >= self.answers
            tokens = whole[:1] if aborted else whole
            self.finished.append(index)
            reason = "abort" if aborted else "length" if index % 2 else "stop"
            total = len(request.prompt) + len(request.begun) + len(tokens) - 1
            routes = np.full((total, 2, 3), index, dtype=np.int16) if self.routes else None
            numbers = -np.arange(len(tokens), dtype=np.float32)
            yield Completion(index, tokens, numbers, reason, self.policy_version, routes)


def part_of(bench, rows: list[int], group_size: int = 2) -> OpInput:
    """These rows; each row's prompt is its own number, up to three times."""
    prompts = [[row] * (1 + row % 3) for row in rows]
    return OpInput(0, bench.batch(rows, prompt_tokens=prompts, group_id=[row // group_size for row in rows]))


def response_of(row: int) -> list[int]:
    return [row] * (1 + row % 3) + [7]


def responses(output: Output) -> list[list[int]]:
    tokens = output.columns["response_tokens"]
    return [tokens[place].tolist() for place in range(len(tokens))]


@settings(deadline=None)
@given(order=st.permutations(range(8)), group_size=st.sampled_from([1, 2, 4]))
def test_a_group_comes_as_soon_as_its_last_response_has(clean_bench, order: list[int], group_size: int) -> None:
    engine = Generator(order)
    seen = []
    part = part_of(clean_bench, list(range(8)), group_size)
    for output in rollout([part], clean_bench.context("rollout", engine=engine)):
        (group,) = set(output.rows // group_size)
        seen.append(group)
        rows = list(range(group * group_size, (group + 1) * group_size))
        assert output.rows.tolist() == rows
        assert set(rows) <= set(engine.finished)
        assert engine.finished[-1] in rows, "it was complete before"
        assert responses(output) == [response_of(row) for row in rows]
        assert not output.unfinished
    assert sorted(seen) == list(range(8 // group_size))


def test_responses_come_with_all_that_the_contract_promises(bench) -> None:
    context = bench.context("rollout", engine=Generator(routes=True))
    (output,) = rollout([part_of(bench, [0, 4], group_size=8)], context)
    assert set(output.columns) == set(context.node.contract().writes)
    assert output.rows.tolist() == [0, 4]
    tokens, logprob = output.columns["response_tokens"], output.columns["rollout_logprob"]
    assert tokens.lengths.tolist() == logprob.lengths.tolist() == [2, 3]
    assert logprob.values.tolist() == [0, -1, 0, -1, -2]
    mask = output.columns["response_mask"]
    assert (mask.values.tolist(), mask.offsets.tolist()) == ([1.0] * 5, tokens.offsets.tolist())
    assert output.columns["policy_version"].values.tolist() == [5, 5]
    assert output.columns["finish_reason"].strings() == ["stop", "length"]
    # A row of one token of prompt and two of response, and one of two and three; the last token is sent nowhere.
    routes = output.columns["routed_experts"]
    assert (routes.values.shape, routes.values.dtype, routes.lengths.tolist()) == ((6, 2, 3), np.int16, [2, 4])
    assert output.sampled == 5


def test_an_engine_without_routes_has_no_column_of_experts(bench) -> None:
    (output,) = rollout([part_of(bench, [0, 1])], bench.context("rollout", engine=Generator()))
    assert "routed_experts" not in output.columns


def test_every_server_draws_a_sample_with_the_seed_of_its_row(bench) -> None:
    whole, half = Generator(), Generator()
    list(rollout([part_of(bench, [0, 1, 2, 3])], bench.context("rollout", engine=whole)))
    list(rollout([part_of(bench, [3, 1])], bench.context("rollout", engine=half)))
    assert half.seeds == [whole.seeds[3], whole.seeds[1]]


# -- aborted, and gone on with


@pytest.fixture
def partial(bench) -> Any:
    """Makes a context of a rollout that goes on with what was begun."""

    def make(engine: Generator, begun: dict[int, Batch] | None = None, *, partial_rollout: bool = True, **options: Any):
        node = {"op": "rollout", "engine": "generator", "n": 2, "sampling": {"max_new_tokens": 4}, **options}
        context = bench.context(
            "rollout", engine=engine, nodes={"rollout": node | {"partial_rollout": partial_rollout}}
        )
        return replace(context, begun=begun or {})

    return make


def begun_of(outputs: list[Output], group_size: int = 2) -> dict[int, Batch]:
    """What was left unfinished, by group, as the next step gets it."""
    (left,) = [output for output in outputs if output.unfinished]
    whole = Batch(left.rows, left.columns)
    groups = left.rows // group_size
    return {int(group): whole.take(np.flatnonzero(groups == group)) for group in np.unique(groups)}


def test_an_abort_leaves_whole_groups_unfinished(bench, partial) -> None:
    engine = Generator([0, 1, 2, 4, 3, 5], answers=3)
    done, left = rollout([part_of(bench, [0, 1, 2, 3, 4, 5])], partial(engine))
    assert (done.rows.tolist(), done.unfinished, done.sampled) == ([0, 1], False, 5)
    assert (left.rows.tolist(), left.unfinished) == ([2, 3, 4, 5], True)
    assert left.columns["finish_reason"].strings() == ["stop", "abort", "abort", "abort"]
    assert responses(left) == [response_of(2), [3], [4], [5]]
    assert left.sampled == 4 + 3
    assert (done.counts["sampled"].tolist(), left.counts["sampled"].tolist()) == ([2, 3], [4, 1, 1, 1])
    assert left.stats == {}


def test_without_partial_rollout_nothing_is_kept_but_how_much_it_was(bench, partial) -> None:
    (left,) = rollout([part_of(bench, [0, 1])], partial(Generator(answers=1), partial_rollout=False))
    assert (left.rows.tolist(), left.unfinished, left.columns, left.sampled) == ([0, 1], True, {}, 3)
    assert left.counts["sampled"].tolist() == [2, 1]


def test_started_samples_continue_and_finished_ones_stay(bench, partial) -> None:
    part = part_of(bench, [2, 5], group_size=8)
    begun = begun_of(list(rollout([part], partial(Generator(answers=1)))), group_size=8)
    engine = Generator(version=6)
    # The same prompts come as group 0 of the next step.
    (output,) = rollout(
        [OpInput(0, bench.batch([0, 1], group_id=[0, 0], prompt_tokens=[[2] * 3, [5] * 3]))], partial(engine, begun)
    )
    assert responses(output) == [response_of(2), response_of(5)]
    assert len(engine.seeds) == 1, "a finished response is not asked for again"
    assert output.columns["rollout_logprob"].values.tolist() == [0, -1, -2, -3, 0, 0, -1, -2]
    assert output.columns["policy_version"].values.tolist() == [5, 5]
    assert output.columns["response_mask"].values.tolist() == [1.0] * 8
    assert output.sampled == 3
    assert output.stats["rollout/begun_token_fraction"].mean == 5 / 8
    assert (output.counts["sampled"].tolist(), output.counts["begun"].tolist()) == ([0, 3], [4, 1])
    assert output.stats["rollout/outdated_fraction"].mean == 0


def test_a_group_that_had_come_too_late_is_there_at_once(bench, partial) -> None:
    part = part_of(bench, [0, 1])
    (late,) = rollout([part], partial(Generator()))
    engine = Generator(version=6)
    (output,) = rollout([part], partial(engine, {0: Batch(late.rows, late.columns)}))
    assert responses(output) == [response_of(0), response_of(1)]
    assert (engine.seeds, output.sampled) == ([], 0)
    assert output.columns["policy_version"].values.tolist() == [5, 5]


@pytest.mark.parametrize(("version", "mask"), [(5, [1.0] * 4), (6, [0.0, 1.0, 1.0, 1.0])])
def test_tokens_of_older_weights_can_be_left_out_of_training(bench, partial, version: int, mask: list[float]) -> None:
    part = part_of(bench, [2, 5], group_size=8)
    begun = begun_of(list(rollout([part], partial(Generator([1, 0], answers=1)))), group_size=8)
    context = partial(Generator(version=version), begun, mask_offpolicy_in_partial_rollout=True)
    (output,) = rollout([OpInput(0, bench.batch([0, 1], group_id=[0, 0], prompt_tokens=[[2] * 3, [5] * 3]))], context)
    assert output.columns["response_mask"][0].tolist() == mask
    # A response that was finished with older weights counts in its group, but trains nothing.
    assert output.columns["response_mask"][1].tolist() == ([1.0] * 4 if version == 5 else [0.0] * 4)
    assert output.counts["masked"].tolist() == ([0, 0] if version == 5 else [1, 4])


def test_a_response_that_is_too_old_starts_again(bench, partial) -> None:
    part = part_of(bench, [0, 1])
    begun = begun_of(list(rollout([part], partial(Generator(answers=1, version=2)))))
    for version, anew in ((4, False), (5, True)):
        engine = Generator(version=version)
        (output,) = rollout([part], partial(engine, begun, partial_rollout_max_age=2))
        assert responses(output) == [response_of(0), response_of(1)]
        assert len(engine.seeds) == (2 if anew else 1)
        assert output.columns["policy_version"].values.tolist() == ([5, 5] if anew else [2, 2])
        assert output.stats["rollout/outdated_fraction"].mean == float(anew)
        assert output.counts["outdated"].tolist() == [anew, anew]
        assert output.counts["begun"].tolist() == ([0, 0] if anew else [2, 1])


@pytest.mark.parametrize(("held", "coming", "anew"), [(3, 4, False), (4, 5, True), (5, 4, True)])
def test_its_age_counts_from_the_newest_weights_present_or_pending(bench, partial, held, coming, anew) -> None:
    """In the midst of a run newer ones may have come than those that it was begun on."""
    part = part_of(bench, [0, 1])
    begun = begun_of(list(rollout([part], partial(Generator(answers=1, version=2)))))
    context = partial(Generator(version=held), begun, partial_rollout_max_age=2)
    context = changed(context, weights=PendingWeights(1, coming))
    (output,) = rollout([part], context)
    assert output.stats["rollout/outdated_fraction"].mean == float(anew)


def test_a_response_can_be_carried_more_than_once(bench, partial) -> None:
    part = part_of(bench, [0, 2], group_size=8)
    begun = begun_of(list(rollout([part], partial(Generator(answers=0, version=2)))), group_size=8)
    again = begun_of(list(rollout([part], partial(Generator(answers=1, version=3), begun))), group_size=8)
    assert again[0]["response_tokens"].lengths.tolist() == [2, 2]
    (output,) = rollout([part], partial(Generator(version=4), again))
    assert responses(output) == [response_of(0), response_of(2)]
    assert output.columns["policy_version"].values.tolist() == [2, 2]
    assert output.sampled == 2


Coordinates = tuple[int, int, bool, int]
coordinates = st.tuples(st.integers(-3, 3), st.integers(0, 50), st.booleans(), st.integers(0, 5000))
"""Seed of the run, step, whether it is validation, row."""


@settings(deadline=None)
@given(drawn=st.lists(coordinates, min_size=1, max_size=10))
def test_no_two_samples_share_a_seed_and_each_is_drawn_again_after_a_resume(
    clean_bench, drawn: list[Coordinates]
) -> None:
    places = {neighbour for place in drawn for neighbour in (place, *neighbours(*place))}

    def seed_of(run_seed: int, step: int, validation: bool, row: int) -> int:
        context = clean_bench.context("rollout", step=step, validation=validation, run={"seed": run_seed})
        return sample_seed(context, row)

    seeds = [seed_of(*place) for place in places]
    assert len(set(seeds)) == len(places)
    assert [seed_of(*place) for place in places] == seeds
    assert all(0 <= seed < 2**64 for seed in seeds)


def neighbours(run_seed: int, step: int, validation: bool, row: int) -> list[Coordinates]:
    """Samples that differ in one thing alone."""
    return [
        (run_seed + 1, step, validation, row),
        (run_seed, step + 1, validation, row),
        (run_seed, step, not validation, row),
        (run_seed, step, validation, row + 1),
    ]


def test_a_seed_knows_nothing_of_the_layout_or_the_place_in_the_data(bench) -> None:
    here = bench.context("rollout", step=2, shards=2)
    there = bench.context("rollout", step=2, shards=7, data={"prompts_per_step": 64})
    assert sample_seed(here, 11) == sample_seed(there, 11)


def test_training_samples_as_the_node_says(bench) -> None:
    assert sampling_of(bench, validation=False).temperature == 0.7


def test_validation_takes_the_likeliest_tokens_and_else_samples_as_in_training(bench) -> None:
    assert sampling_of(bench, validation=True) == SamplingSpec(temperature=0.0, max_new_tokens=3, stop_token_ids=(4,))


def test_validation_samples_as_it_says_itself(bench) -> None:
    own = {"temperature": 0.3, "max_new_tokens": 9}
    assert sampling_of(bench, validation=True, val_sampling=own) == SamplingSpec(temperature=0.3, max_new_tokens=9)
    assert sampling_of(bench, validation=False, val_sampling=own).temperature == 0.7


def sampling_of(bench, *, validation: bool, **more) -> SamplingSpec:
    """What the generator is asked for."""
    engine = Generator()
    sampling = {"temperature": 0.7, "max_new_tokens": 3, "stop_token_ids": (4,)}
    node = {"op": "rollout", "engine": "generator", "n": 2, "sampling": sampling, **more}
    context = bench.context("rollout", engine=engine, validation=validation, nodes={"rollout": node})
    list(rollout([part_of(bench, [0, 1])], context))
    return engine.sampling


def test_the_likeliest_response_to_a_prompt_is_sampled_once(bench) -> None:
    """As a baseline for ReMax, say: all rows of a group have the same prompt."""
    engine = Generator(routes=True)
    batch = bench.batch([0, 1, 2, 3], prompt_tokens=[[4, 4], [4, 4], [5], [5]], group_id=[0, 0, 1, 1])
    sampling = {"temperature": 0, "max_new_tokens": 3}
    nodes = {"rollout": {"op": "rollout", "engine": "generator", "n": 2, "sampling": sampling}}
    outputs = list(rollout([OpInput(0, batch)], bench.context("rollout", engine=engine, nodes=nodes)))
    assert len(engine.seeds) == 2
    assert [output.rows.tolist() for output in outputs] == [[0, 1], [2, 3]]
    assert [responses(output) for output in outputs] == [[[4, 4, 7]] * 2, [[5, 7]] * 2]
    assert [output.sampled for output in outputs] == [3, 2]
    assert [len(set(output.columns["finish_reason"].strings())) for output in outputs] == [1, 1]
    # With chance, each row has a response of its own.
    list(rollout([OpInput(0, batch)], bench.context("rollout", engine=engine)))
    assert len(set(engine.seeds)) == 4


def test_validation_sets_with_sampling_of_their_own_are_sampled_so(bench) -> None:
    calls = []

    class Noting(Generator):
        def generate(self, requests: Sequence[GenerationRequest], sampling: SamplingSpec) -> Iterator[Completion]:
            own = [request.sampling or sampling for request in requests]
            calls.append([(each.temperature, each.max_new_tokens) for each in own])
            return super().generate(requests, sampling)

    hot = {"temperature": 0.75, "max_new_tokens": 9}
    val = {"a": "a.parquet", "hot": {"path": "b.parquet", "sampling": hot}, "c": {"path": "c.parquet"}}
    part = part_of(bench, list(range(6)), group_size=1)
    names = ["a", "hot", "hot", "c", "hot", "a"]
    part = OpInput(0, Batch(part.batch.rows, {**part.batch.columns, "data_set": Column.text(names)}))

    def sampled(*, validation: bool) -> dict[int, list[int]]:
        calls.clear()
        context = bench.context("rollout", engine=Noting(), validation=validation, data={"val": val})
        outputs = list(rollout([part], context))
        return {int(row): said for output in outputs for row, said in zip(output.rows, responses(output), strict=True)}

    assert sampled(validation=True) == {row: response_of(row) for row in range(6)}
    (asked,) = calls
    assert sorted(asked) == [(0.0, 3)] * 3 + [(0.75, 9)] * 3
    assert sampled(validation=False) == {row: response_of(row) for row in range(6)}
    assert len({*calls[0]}) == 1


def test_each_source_is_sampled_in_its_own_way_and_the_likeliest_once(bench) -> None:
    asked: list[tuple[list[int], float, int]] = []

    class Noting(Generator):
        def generate(self, requests: Sequence[GenerationRequest], sampling: SamplingSpec) -> Iterator[Completion]:
            for request in requests:
                own = request.sampling or sampling
                asked.append((request.prompt.tolist(), own.temperature, own.max_new_tokens))
            return super().generate(requests, sampling)

    train = {
        "easy": {"path": "a.parquet", "sampling": {"temperature": 0, "max_new_tokens": 9}},
        "hard": {"path": "b.parquet", "sampling": {"temperature": 1.2, "max_new_tokens": 5}},
        "usual": "c.parquet",
    }
    sources = ["easy", "easy", "hard", "hard", "usual", "usual"]
    batch = bench.batch(list(range(6)), prompt_tokens=[[4]] * 6, group_id=[0, 0, 1, 1, 2, 2])
    batch = batch.with_columns({"data_set": Column.text(sources)})
    sampling = {"temperature": 0.7, "max_new_tokens": 3}
    nodes = {"rollout": {"op": "rollout", "engine": "generator", "n": 2, "sampling": sampling}}
    context = bench.context("rollout", engine=Noting(), nodes=nodes, data={"train": train})
    list(rollout([OpInput(0, batch)], context))
    assert asked == [([4], 0.0, 9), ([4], 1.2, 5), ([4], 1.2, 5), ([4], 0.7, 3), ([4], 0.7, 3)]
