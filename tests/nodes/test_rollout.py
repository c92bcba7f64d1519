"""Rollout: streams shards as they are complete, with seeds that a resumed run draws again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from dagrl.engines.base import Completion, GenerationRequest
from dagrl.nodes.base import Part
from dagrl.nodes.rollout import rollout, sample_seed
from dagrl.spec.ops import contract_of
from dagrl.spec.schema import SamplingSpec


class Generator:
    """Says each prompt's tokens and one more, its prompt's place in the call; finishes them in a given order."""

    policy_version = 5

    def __init__(self, order: Sequence[int] | None = None) -> None:
        self.order = order
        self.finished: list[int] = []

    def generate(self, requests: Sequence[GenerationRequest], sampling: SamplingSpec) -> Iterator[Completion]:
        self.seeds, self.sampling = [request.seed for request in requests], sampling
        for index in range(len(requests)) if self.order is None else self.order:
            self.finished.append(index)
            tokens = np.array([*requests[index].prompt, index])
            reason = "length" if index % 2 else "stop"
            yield Completion(index, tokens, -np.arange(len(tokens), dtype=np.float32), reason, self.policy_version)


def parts_of(bench, *shards: list[int]) -> list[Part]:
    """Shards of these rows; each row's prompt is its own number."""
    return [
        Part(index, bench.batch(rows, prompt_tokens=[[row] * (1 + row % 3) for row in rows]))
        for index, rows in enumerate(shards)
    ]


SHARDS = ([0, 1, 2], [3], [4, 5, 6, 7])


@settings(deadline=None)
@given(order=st.permutations(range(8)))
def test_a_shard_comes_as_soon_as_its_last_response_has(clean_bench, order: list[int]) -> None:
    engine = Generator(order)
    seen = []
    for output in rollout(parts_of(clean_bench, *SHARDS), clean_bench.context("rollout", engine=engine, shards=3)):
        (shard,) = output.shards
        seen.append(shard)
        assert set(SHARDS[shard]) <= set(engine.finished)
        assert engine.finished[-1] in SHARDS[shard], "it was complete before"
        tokens = output.columns["response_tokens"]
        assert [tokens[place].tolist() for place in range(len(tokens))] == [
            [row] * (1 + row % 3) + [row] for row in SHARDS[shard]
        ]
    assert sorted(seen) == [0, 1, 2]


def test_responses_come_with_all_that_the_contract_promises(bench) -> None:
    context = bench.context("rollout", engine=Generator())
    (output,) = rollout(parts_of(bench, [0, 4]), context)
    assert set(output.columns) == set(contract_of(context.node).writes)
    assert output.rows.tolist() == [0, 4]
    tokens, logprob = output.columns["response_tokens"], output.columns["rollout_logprob"]
    assert tokens.lengths.tolist() == logprob.lengths.tolist() == [2, 3]
    assert logprob.values.tolist() == [0, -1, 0, -1, -2]
    mask = output.columns["response_mask"]
    assert (mask.values.tolist(), mask.offsets.tolist()) == ([1.0] * 5, tokens.offsets.tolist())
    assert output.columns["policy_version"].values.tolist() == [5, 5]
    assert output.stats["response_tokens"].mean == 2.5
    assert output.stats["response_tokens/cut_fraction"].mean == 0.5


def test_an_empty_shard_comes_too_with_its_columns(bench) -> None:
    context = bench.context("rollout", engine=Generator(), shards=3)
    outputs = {output.shards: output for output in rollout(parts_of(bench, [], [2], []), context)}
    assert set(outputs) == {(0,), (1,), (2,)}
    assert {name: len(column) for name, column in outputs[2,].columns.items()} == dict.fromkeys(
        contract_of(context.node).writes, 0
    )
    assert outputs[0,].columns["response_tokens"].values.dtype == np.int64


def test_a_sample_is_drawn_with_the_seed_of_its_row_whoever_draws_it(bench) -> None:
    whole, half = Generator(), Generator()
    list(rollout(parts_of(bench, [0, 1], [2, 3]), bench.context("rollout", engine=whole)))
    list(rollout(parts_of(bench, [3], [1]), bench.context("rollout", engine=half)))
    assert half.seeds == [whole.seeds[3], whole.seeds[1]]


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
    here = bench.context("rollout", step=2, position=8, shards=2)
    there = bench.context("rollout", step=2, position=40, shards=7, data={"prompts_per_step": 64})
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
    list(rollout(parts_of(bench, [0, 1]), context))
    return engine.sampling
