"""Templates and parsers of judges."""

from __future__ import annotations

import re

import numpy as np
import pytest

from dagrl.plugins.judging import Judged, fields_in, filled, finite, is_function, parse, parser_arguments

JUDGED = Judged(prompt="2+2?", response="It is 4.", answer="4", data_source="sums")


def test_fields_are_filled_in_and_other_braces_stay() -> None:
    template = '{prompt}|{response}|{answer}|{data_source}|{"score": 1} \\boxed{x} {{response}} {prompt!r}'
    assert filled(template, JUDGED) == '2+2?|It is 4.|4|sums|{"score": 1} \\boxed{x} {It is 4.} {prompt!r}'


def test_a_response_cannot_ask_for_the_answer() -> None:
    sly = Judged("q", "{answer} {prompt} \\g<1> \\1", "secret", "s")
    assert filled("{response}", sly) == "{answer} {prompt} \\g<1> \\1"


def test_all_names_in_braces_are_found() -> None:
    assert fields_in('{response} {respnse} {"a": 1} {a b}') == {"response", "respnse"}


@pytest.mark.parametrize(
    ("pattern", "reply", "score"),
    [
        (r"-?\d+(?:\.\d+)?", "First 3, then -2.5 of 10", 10.0),
        (r"[Ss]core:\s*(\S+)", "score: 1\nScore: 0.5\nend", 0.5),
        (r"(\d+)/10", "7/10", 7.0),
        (r"(?:rated )?(\d)|x", "rated 4", 4.0),
    ],
)
def test_the_last_match_is_the_score(pattern: str, reply: str, score: float) -> None:
    assert parse(reply, re.compile(pattern), None) == score


def test_words_have_the_scores_that_they_are_given() -> None:
    pattern, scores = re.compile(r"\b(GOOD|BAD|so-so)\b"), {"GOOD": 1.0, "BAD": -1.0}
    assert parse("BAD? No, GOOD.", pattern, scores) == 1.0
    with pytest.raises(ValueError, match="it contains 'so-so', which is none of GOOD, BAD"):
        parse("so-so", pattern, scores)


@pytest.mark.parametrize(
    ("pattern", "reply", "what"),
    [
        (r"\d+", "no idea", r"nothing in it matches '\\\\d\+'"),
        (r"score: (.*)", "score: high", "it contains 'high', which is no number"),
        (r"score: (.*)", "score: nan", "which is no number"),
        (r"score: (.*)", "score: 1e999", "which is no number"),
        (r"(\d)|x", "x", "it contains '', which is no number"),
    ],
)
def test_a_reply_without_a_score_is_reported(pattern: str, reply: str, what: str) -> None:
    with pytest.raises(ValueError, match=what):
        parse(reply, re.compile(pattern), None)


def test_scores_are_finite_numbers() -> None:
    assert finite(np.float32(0.5)) == 0.5
    for wrong in (True, None, "1", float("inf"), float("nan"), 1e39, [1]):
        with pytest.raises(ValueError, match="is no finite number"):
            finite(wrong)


@pytest.mark.parametrize("parser", ["my_judge:parse", "a.b.c:d_1"])
def test_functions_are_distinguished_from_patterns(parser: str) -> None:
    assert is_function(parser)


@pytest.mark.parametrize("parser", [r"score:\s*(\d)", r"\d+", "(a:b)", "score: x", ":x", r"Score:(\d+)"])
def test_patterns_are_distinguished_from_functions(parser: str) -> None:
    assert not is_function(parser)


def test_a_function_is_given_what_it_asks_for() -> None:
    assert parser_arguments(lambda reply: 0) == ("reply",)
    assert parser_arguments(lambda answer, *, reply, scale=2: 0) == ("reply", "answer")
    assert parser_arguments(lambda **told: 0) == ("reply", "prompt", "response", "answer", "data_source")
    with pytest.raises(ValueError, match="does not take `reply`"):
        parser_arguments(lambda answer: 0)
    with pytest.raises(ValueError, match="wants 'text', which is none of reply, prompt"):
        parser_arguments(lambda reply, text: 0)
