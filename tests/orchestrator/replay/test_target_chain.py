"""The way to the weights with which a recorded node began."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagrl.orchestrator.records.files import RecordedInputs, RecordError
from dagrl.orchestrator.replay.target import RecordedUpdate, chain_to

A, B = Path("a"), Path("b")


def update(step: int, order: int = 5, *, ends: bool = True, node: str = "update") -> RecordedUpdate:
    inputs = RecordedInputs(order=order, shards=(0,), round=0, ends=ends, rows=[], sources={})
    return RecordedUpdate(step, node, inputs, 1)


@pytest.mark.parametrize(
    ("step", "order", "updates", "states", "begin", "repeated"),
    [
        (1, 3, [update(1)], {}, 0, []),
        (3, 3, [update(1), update(2), update(3)], {}, 0, [1, 2]),
        (3, 3, [update(1), update(2)], {1: A}, 1, [2]),
        (3, 3, [update(1), update(2)], {1: A, 2: B}, 2, []),
        # A state after the step is of no use.
        (3, 3, [update(1), update(2)], {3: A}, 0, [1, 2]),
        # Records begin after a checkpoint.
        (5, 3, [update(4)], {3: A}, 3, [4]),
        # Behind another update of the same engine in its step.
        (2, 9, [update(1), update(2, 5), update(2, 9)], {1: A}, 1, [2]),
        # Before all updates of its step.
        (2, None, [update(1), update(2, 1)], {1: A}, 1, []),
        # In pieces.
        (2, 9, [update(1, 3, ends=False), update(1, 5)], {}, 0, [1, 1]),
    ],
)
def test_the_nearest_state_is_taken(step, order, updates, states, begin, repeated) -> None:
    chain = chain_to("actor", step, order, updates, states)
    assert (chain.step, [each.step for each in chain.updates]) == (begin, repeated)
    assert chain.folder == states.get(begin)


@pytest.mark.parametrize(
    "updates",
    [[], [update(2)], [update(1, ends=False), update(2)], [update(1), update(1, node="sft", ends=False), update(2)]],
)
def test_a_gap_is_an_error_that_says_what_to_do(updates: list[RecordedUpdate]) -> None:
    with pytest.raises(RecordError, match=r"actor in step 3 cannot be restored: .*step 0.*run\.save_every"):
        chain_to("actor", 3, 1, updates, {})


def test_a_gap_does_not_matter_behind_a_later_state() -> None:
    chain = chain_to("actor", 5, 1, [update(1), update(4)], {1: A, 3: B})
    assert (chain.folder, str(chain)) == (B, "actor from the state after step 3, through the updates of step 4")


@given(st.permutations([update(step, order) for step in (1, 2, 3) for order in (2, 4)]))
def test_updates_are_repeated_in_order(updates: list[RecordedUpdate]) -> None:
    chain = chain_to("actor", 3, 3, updates, {})
    assert [(each.step, each.inputs.order) for each in chain.updates] == [(1, 2), (1, 4), (2, 2), (2, 4), (3, 2)]
