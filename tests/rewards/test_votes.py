"""How the answer in a response is found, by what the pipeline says."""

from __future__ import annotations

import pytest

from dagrl.config.schema.val_metrics import Vote
from dagrl.ops.samples import load_vote


def test_the_math_reward_votes_by_final_answers() -> None:
    assert load_vote(Vote("math", {"timeout_s": 1.0}))(r"\boxed{1,234}") == "1234"
    assert load_vote(Vote("math", {"strict": True}))("It is 1234") is None


def test_the_exact_reward_votes_by_what_it_compares() -> None:
    vote = load_vote(Vote("exact", {"extract": "answer: (.*)", "ignore_case": True}))
    assert vote("Answer? answer: Paris ") == "paris"
    assert vote("no idea") is None
    assert load_vote(Vote("exact"))(" Paris") == "Paris"


def test_an_answer_is_a_text_or_none(tmp_path) -> None:
    (tmp_path / "odd_votes.py").write_text("def seven(response):\n    return 7\n")
    with pytest.raises(
        ValueError,
        match=r"data.val_vote odd_votes:seven \(.*odd_votes\.py:\d+\) returned 7; return a text or None",
    ):
        load_vote(Vote("odd_votes:seven"), tmp_path)("x")
