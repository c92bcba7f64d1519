"""What counts as the expected output or value."""

from __future__ import annotations

import pytest

from dagrl.rewards.code.tests import same_output, same_value


@pytest.mark.parametrize(
    ("written", "expected", "same"),
    [
        ("1 2\n3\n", "1 2 \r\n3", True),
        ("", "\n", True),
        ("1 2", "12", False),
        ("1", "1 2", False),
        ("Yes", "YES", False),
        ("0.3333333", "0.33333333333", True),
        ("0.333", "0.33333333333", False),
        ("1000000.5", "1000000.0", True),
        ("3", "3.0", True),
        ("1e3", "1000.0", True),
        # Whole numbers are exact.
        ("3.0", "3", True),
        ("-3.", "-3", True),
        ("3.1", "3", False),
        ("3.0000001", "3", False),
        ("3.0", "4", False),
        ("1000000007.0", "1000000006", False),
        ("3e0", "3", False),
        ("A.0", "A", False),
        ("1000000007", "1000000006", False),
        ("nan", "1.0", False),
        ("inf", "1e400", True),
    ],
)
def test_outputs_are_compared_word_by_word(written: str, expected: str, same: bool) -> None:
    assert same_output(written, expected) is same


@pytest.mark.parametrize(
    ("returned", "expected", "same"),
    [
        ([0, 1], [0, 1], True),
        ([0, 2], [0, 1], False),
        ([0], [0, 1], False),
        ([0, 1], [[0, 1]], True),
        ([[0, 1]], [0, 1], False),
        (3, [3], True),
        (3, 3.0, True),
        (2.0000001, 2.0, True),
        (2.1, 2.0, False),
        (True, True, True),
        (True, 1, False),
        (1, True, False),
        (True, 1.0, False),
        (None, None, True),
        (None, [], False),
        ({"a": [1.0]}, {"a": [1.0 + 1e-9]}, True),
        ({"a": 1}, {"b": 1}, False),
        ({"a": 1}, ["a"], False),
        (["a"], {"a": 1}, False),
        ("ab", "ab", True),
        ([], [[]], True),
    ],
)
def test_values_are_compared_as_json(returned: object, expected: object, same: bool) -> None:
    assert same_value(returned, expected) is same
