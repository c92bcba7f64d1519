"""Prompts left unfinished: they come first, and a checkpoint holds each that was not trained on."""

from __future__ import annotations

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
