"""Prompts left unfinished: they come first, and a checkpoint holds each that was not trained on."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dagrl.ops.work import Carried, PartialRollout
from dagrl.orchestrator.steps.prompt_feed import PartialRolloutBuffer


def test_unfinished_prompts_come_first_oldest_first_with_their_tokens() -> None:
    carried = PartialRolloutBuffer([Carried(40, None, (5, -1)), Carried(7)])
    begun = PartialRollout("ref", None)
    carried.add(3, [Carried(50, begun, (3, 4)), Carried(51)])
    assert carried.take(4, 3) == (40, 7, 50)
    assert carried.taken(4) == [Carried(40, None, (5, -1)), Carried(7), Carried(50, begun, (3, 4))]
    assert carried.take(5, 3) == (51,)
    assert carried.taken(5) == [Carried(51)]
    assert carried.take(6, 3) == ()


def test_a_prompt_may_be_unfinished_again() -> None:
    carried = PartialRolloutBuffer()
    carried.add(1, [Carried(9, PartialRollout("one", None))])
    assert carried.take(2, 4) == (9,)
    carried.add(2, [Carried(9, PartialRollout("two", None))])
    assert [each.prompt for each in carried.after(1)] == [9]
    assert [each.prompt for each in carried.after(2)] == [9]
    carried.commit(1)
    carried.commit(2)
    assert carried.take(3, 4) == (9,)
    assert [(each.prompt, each.begun.ref) for each in carried.taken(3)] == [(9, "two")]
    carried.commit(3)
    assert carried.after(3) == []


def test_each_round_of_a_step_has_its_own_prompts() -> None:
    carried = PartialRolloutBuffer()
    first, second = PartialRollout("first", None), PartialRollout("second", None)
    carried.add(1, [Carried(9, first), Carried(9, second)])
    assert carried.take(2, 1) == (9,)
    assert carried.take(2, 1, 1) == (9,)
    assert carried.taken(2) == [Carried(9, first)]
    assert carried.taken(2, 1) == [Carried(9, second)]


@given(
    needed=st.integers(1, 4),
    more=st.integers(1, 5),
    ahead=st.integers(0, 2),
    draw=st.data(),
)
def test_no_prompt_is_lost_wherever_a_run_resumes(needed: int, more: int, ahead: int, draw) -> None:
    """Steps take prompts up to `ahead` steps before earlier ones are committed."""
    carried, position = PartialRolloutBuffer(), 0
    cursor: dict[int, int] = {0: 0}
    trained: dict[int, list[int]] = {0: []}
    taken: dict[int, tuple[int, ...]] = {}
    steps = 6
    for step in range(1, steps + ahead + 1):
        if step <= steps:
            mine = carried.take(step, needed + more)
            fresh = range(position, position + needed + more - len(mine))
            position, taken[step] = fresh.stop, (*mine, *fresh)
            cursor[step] = position
        done = step - ahead
        if done >= 1:
            order = draw.draw(st.permutations(taken[done]))
            trained[done] = list(order[:needed])
            carried.add(done, [Carried(each) for each in taken[done] if each not in order[:needed]])
            saved = [each.prompt for each in carried.after(done)]
            assert len(set(saved)) == len(saved)
            so_far = [each for at in range(done + 1) for each in trained[at]]
            # Each prompt before the cursor was trained on, or comes again: nothing else, and none twice.
            assert sorted([*so_far, *saved]) == list(range(cursor[done]))
            carried.commit(done)
