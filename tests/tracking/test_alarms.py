"""When alarms begin, and that they follow from metrics.jsonl alone."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagrl.config.schema import RunSpec
from dagrl.tracking.alarms import Alarms, alarms_of

_NAN = math.nan


def steps_of(text: str, values: list, key: str = "warn_when") -> list[int]:
    """Steps, from 1, whose value of the metric ``a`` raises an alarm; None: a step without it."""
    alarms = Alarms(RunSpec(steps=9, **{"warn_when": (), "stop_when": (), key: (text,)}))
    metrics = [{} if value is None else {"a": value} for value in values]
    return [step for step, line in enumerate(metrics, 1) if alarms.look(step, line)]


@pytest.mark.parametrize(
    ("text", "values", "steps"),
    [
        ("a > 1", [2, 2, 0, 2], [1, 4]),
        ("a > 1 for 2", [2, 0, 2, 2, 2, 0, 2, 2], [4, 8]),
        # Steps without it do not count, as validations every few steps.
        ("a > 1 for 2", [2, None, _NAN, math.inf, 2], [5]),
        # Unknown before five steps; a value is not part of what is usual for itself.
        ("a > 3 usual", [9, 1, 1, 1, 1, 9], [6]),
        ("a > 3 usual", [9, 1, 1, 1, 9], []),
        ("a < 0.5 usual for 2", [4, 4, 4, 4, 4, 1, 1, 1], [7]),
        # What lasts becomes usual.
        ("a > 3 usual", [1] * 6 + [9] * 10 + [1] * 2 + [9] * 2, [7]),
        ("a > 3 usual", [0] * 6 + [9], []),
    ],
)
def test_a_warning_is_given_when_it_begins(text: str, values: list, steps: list[int]) -> None:
    assert steps_of(text, values) == steps


def test_what_stops_a_run_stops_it_in_each_step() -> None:
    assert steps_of("a > 1 for 2", [2, 2, 2, 0, 2], "stop_when") == [2, 3]


_VALUES = st.one_of(st.none(), st.sampled_from([0.0, 1.0, 5.0, math.nan, math.inf]), st.floats(0, 10))


@given(st.lists(st.dictionaries(st.sampled_from("ab"), _VALUES), max_size=40), st.integers(0, 40))
def test_a_resumed_run_has_the_alarms_of_an_unbroken_one(lines: list[dict], resumed: int) -> None:
    run = RunSpec(
        steps=9, warn_when=("a > 2 usual", "b < 0.5 usual for 2", "a == 0 for 3"), stop_when=("b > 2 for 2", "a != 5")
    )
    metrics = [{name: value for name, value in line.items() if value is not None} for line in lines]
    unbroken, before, after = (Alarms(run) for _ in range(3))
    whole = [unbroken.look(step, line) for step, line in enumerate(metrics)]
    first = [before.look(step, line) for step, line in enumerate(metrics[:resumed])]
    # As metrics.jsonl has them.
    written = [{name: value if math.isfinite(value) else None for name, value in line.items()} for line in metrics]
    for step, line in enumerate(json.loads(json.dumps(written[:resumed]))):
        after.look(step, line)
    rest = [after.look(step, line) for step, line in enumerate(metrics[resumed:], resumed)]
    assert first + rest == whole


def test_a_report_has_each_alarm_once_with_the_conditions_of_the_file() -> None:
    lines = [{"step": step, "a": 2.0, "entropy": 0.001} for step in range(1, 6)]
    (alarm,) = alarms_of(lines, {"steps": 5, "warn_when": [], "stop_when": ["a > 1 for 2"]})
    assert (alarm.step, alarm.stops) == (2, True)
    assert str(alarm) == "a is 2 (run.stop_when: a > 1 for 2)"
    for unread in ({}, {"steps": "many"}, {"warn_when": ["a >"]}):
        (alarm,) = alarms_of(lines, unread)
        assert (alarm.step, alarm.condition.metric) == (3, "entropy")
