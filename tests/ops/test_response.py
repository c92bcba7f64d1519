"""Responses of several turns: which tokens are trained on, whose they are, and what they have earned."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagrl.backends.base import Completion
from dagrl.data.batch import Batch
from dagrl.ops.response import Response, columns_of, passages, turn_columns_of


def said(tokens: list[int], *, version: int = 5, reason: str = "stop") -> Completion:
    return Completion(
        0, np.array(tokens), np.array([-float(token) for token in tokens], dtype=np.float32), reason, version
    )


def conversation() -> Response:
    response = Response(9).with_turn(said([1, 2, 3], version=6)).with_outcome(reward=0.5, calls=2, failed_calls=1)
    response = response.with_observation(np.array([70, 71]))
    return response.with_turn(said([4], version=5, reason="length")).with_outcome(reward=-1.0)


def test_messages_of_others_are_not_trained_on() -> None:
    response = conversation()
    assert response.tokens.tolist() == [1, 2, 3, 70, 71, 4]
    assert response.mask.tolist() == [1, 1, 1, 0, 0, 1]
    assert response.logprobs.tolist() == [-1, -2, -3, 0, 0, -4]
    assert (response.sampled, response.version, response.finish_reason) == (4, 5, "length")
    assert (response.mask.dtype, response.logprobs.dtype, response.tokens.dtype) == ("float32", "float32", "int64")


def test_a_response_is_unfinished_while_it_is_answered() -> None:
    response = Response(0).with_turn(said([1]))
    assert response.finished
    assert not response.with_observation(np.array([7])).finished
    assert response.ended("turns").finish_reason == "turns"


def test_rewards_are_at_the_last_tokens_of_their_turns() -> None:
    assert conversation().token_turns().tolist() == [1, 1, 1, 0, 0, 2]
    assert conversation().token_rewards().tolist() == [0, 0, 0.5, 0, 0, -1]


def test_a_turn_without_tokens_takes_no_other_turns_place() -> None:
    response = Response(0).with_turn(said([1, 2])).with_outcome(reward=1.0).with_observation(np.array([7]))
    aborted = response.with_turn(said([], reason="abort")).with_outcome(reward=5.0)
    assert aborted.token_rewards().tolist() == [0, 1, 0]


def test_one_turn_is_what_it_was_without_turns() -> None:
    response = Response(3).extended(said([4, 5]))
    assert (response.sampled, response.turns, response.version) == (2, (), 5)
    assert response.mask.tolist() == [1, 1]


def test_routes_outlive_a_request_that_sampled_nothing_but_not_what_others_say() -> None:
    routes = np.zeros((4, 2, 2), dtype=np.int16)
    response = Response(3).extended(replace(said([4, 5], reason="abort"), routed_experts=routes))
    assert response.extended(said([], reason="length")).routed_experts is routes
    assert response.with_observation(np.array([7])).with_turn(said([], reason="length")).routed_experts is None


def test_rewards_of_turns_have_a_column_where_there_are_any() -> None:
    assert list(turn_columns_of([conversation()], rewarded=False)) == ["turns", "token_turn"]
    columns = turn_columns_of([conversation(), Response(0)], rewarded=True)
    assert columns["turns"].values.tolist() == [2, 0]
    assert columns["token_turn"].values.dtype == np.int16, "int64 columns are counted as tokens"
    assert columns["token_reward"].lengths.tolist() == [6, 0]


turns = st.lists(
    st.tuples(
        st.lists(st.integers(0, 99), min_size=1, max_size=4),
        st.lists(st.integers(0, 99), max_size=3),
        st.integers(-2, 2),
    ),
    min_size=1,
    max_size=5,
)


@given(drawn=st.lists(turns, min_size=1, max_size=3))
def test_columns_read_again_are_the_turns_that_there_were(drawn: list[list[tuple[list[int], list[int], int]]]) -> None:
    responses, expected = [], []
    for each in drawn:
        response, spoken = Response(0), []
        for place, (words, answer, reward) in enumerate(each):
            response = response.with_turn(said(words)).with_outcome(reward=float(reward))
            spoken.append((words, place + 1, float(reward)))
            if place + 1 < len(each):
                response = response.with_observation(np.array(answer, dtype=np.int64))
                spoken += [(answer, 0, 0.0)] if answer else []
        responses.append(response)
        expected.append(spoken)
    columns = columns_of(responses) | turn_columns_of(responses, rewarded=True)
    batch = Batch(np.arange(len(responses)), columns)
    found = [
        [(each.tokens.tolist(), each.turn, each.reward) for each in passages(batch, row)] for row in range(len(batch))
    ]
    assert found == expected


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_a_log_prob_that_is_no_number_is_unknown_in_one_way(wrong: float) -> None:
    logprobs = np.array([-0.5, wrong, -1.0], dtype=np.float32)
    response = Response(0).extended(Completion(0, np.array([1, 2, 3]), logprobs, "stop", 0))
    np.testing.assert_array_equal(response.logprobs, np.array([-0.5, np.nan, -1.0], dtype=np.float32))
    assert response.logprobs.dtype == np.float32
