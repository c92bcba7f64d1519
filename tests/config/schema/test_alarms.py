"""Conditions on metrics."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagrl.config.schema.alarms import STOPS, WARNINGS, parse_condition, with_defaults


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("grad_norm > 100", ("grad_norm", ">", 100.0, False, 1)),
        ("reward/std == 0 for 5", ("reward/std", "==", 0.0, False, 5)),
        ("throughput/tokens_per_s < 0.5 usual for 3", ("throughput/tokens_per_s", "<", 0.5, True, 3)),
        ("grad_norm>=10 usual", ("grad_norm", ">=", 10.0, True, 1)),
        (" val/a-b.c/mean@8 <= -1e-3 for 1 step ", ("val/a-b.c/mean@8", "<=", -1e-3, False, 1)),
        ("kl/ref != 0 for 2 steps", ("kl/ref", "!=", 0.0, False, 2)),
    ],
)
def test_conditions_have_a_metric_a_comparison_and_a_number(text: str, parts: tuple) -> None:
    condition = parse_condition(text)
    assert (condition.metric, condition.comparison, condition.number, condition.of_usual, condition.steps) == parts


@pytest.mark.parametrize(
    "text",
    [
        *("", "grad_norm", "grad_norm > ", "> 1", "a => 1", "a = 1", "a > 1 for", "a > 1 for 0", "a > 1 for 2.5"),
        *("a > 1 usually", "a > 1 and b > 2", "a > 1 for 2 usual", "1 < a < 2", "a b > 1", "a > 1\nb > 2"),
    ],
)
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a condition; write `grad_norm > 100`"):
        parse_condition(text)


@pytest.mark.parametrize("number", ["nan", "inf", "1e999", "x", "20%", "0.5usual"])
def test_the_number_is_finite(number: str) -> None:
    with pytest.raises(ValueError, match="is not a finite number"):
        parse_condition(f"a > {number}")


@given(st.text(max_size=40))
def test_any_text_is_a_condition_or_a_sentence(text: str) -> None:
    try:
        condition = parse_condition(text)
    except ValueError as error:
        assert "; write" in str(error)
    else:
        assert condition.metric in text and condition.steps >= 1


@given(st.floats(-1e6, 1e6), st.sampled_from(["<", "<=", ">", ">=", "==", "!="]), st.floats(-1e6, 1e6))
def test_a_condition_is_met_as_python_compares(value: float, comparison: str, bound: float) -> None:
    expected = eval(f"{value!r} {comparison} {bound!r}")
    assert parse_condition(f"metric {comparison} {bound!r} for 2").is_met(value, None) == expected


def test_a_multiple_of_an_unknown_usual_value_is_not_met() -> None:
    condition = parse_condition("seconds != 3 usual")
    assert not condition.is_met(5, None)
    assert condition.is_met(5, 2) and not condition.is_met(6, 2)


def test_defaults_hold_for_metrics_that_are_not_named() -> None:
    own = with_defaults(["entropy < 1"], WARNINGS)
    assert [condition.text for condition in own if condition.metric == "entropy"] == ["entropy < 1"]
    assert {condition.metric for condition in own} == {parse_condition(text).metric for text in WARNINGS}
    assert with_defaults([], WARNINGS) == ()
    assert [condition.text for condition in with_defaults(STOPS, STOPS)] == list(STOPS)


def test_the_page_lists_the_defaults() -> None:
    page = (Path(__file__).parents[3] / "docs" / "alarms.md").read_text()
    rows = [line.split("`")[1] for line in page.splitlines() if line.startswith("| `") and "run." not in line]
    assert rows == [*WARNINGS, *STOPS]
