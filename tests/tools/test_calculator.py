"""The calculator: what it works out, and that nothing else can be run by it."""

from __future__ import annotations

import operator
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagrl.tools.calculator import calculator

SIGNS: dict[str, Callable[[int, int], int]] = {"+": operator.add, "-": operator.sub, "*": operator.mul}


@pytest.mark.parametrize(
    ("expression", "result"),
    [
        ("3*4", "12"),
        (" (3 + 4.5) * 2 ** 3 ", "60"),
        ("0.1 + 0.2", "0.3"),
        ("7/2", "3.5"),
        ("6/2", "3"),
        ("7 // 2 + 7 % 4", "6"),
        ("-2 ** 2", "-4"),
        ("2 ** -2", "0.25"),
        ("10 / 3", "3.33333333333"),
        ("max(1, 2, 3) + min(4, 5) + abs(-6)", "13"),
        ("1 ** 10000 + (-1) ** 10001", "0"),
        ("1.0001 ** 10000", "2.71814592682"),
        ("round(2.567, 2)", "2.57"),
        ("round(2.5) + round(1234, -2)", "1202"),
        ("round(7, -10 ** 20) + round(7.5, -10 ** 20)", "0"),
        ("floor(2.5) + ceil(2.5) + sqrt(16)", "9"),
        ("10 ** 20 + 1", "100000000000000000001"),
        ("1e3", "1000"),
    ],
)
def test_arithmetic(expression: str, result: str) -> None:
    assert calculator(expression) == result


@given(left=st.integers(-999, 999), sign=st.sampled_from(list(SIGNS)), right=st.integers(0, 999))
def test_whole_numbers_are_exact(left: int, sign: str, right: int) -> None:
    assert calculator(f"({left}) {sign} {right}") == str(SIGNS[sign](left, right))


@pytest.mark.parametrize(
    ("expression", "reason"),
    [
        ("1/0", "division by zero"),
        ("5 % 0", "division by zero"),
        ("9**9**9", "too large"),
        ("2**5000", "too large"),
        ("(2**4000)*(2**4000)", "too large"),
        ("1e308*10", "too large"),
        ("1e400", "too large"),
        ("(-8)**0.5", "not a real number"),
        ("sqrt(-1)", "math domain error"),
        ("max()", "max does not accept 0 such numbers"),
        ("round(1, 2.5)", "round does not accept 2 such numbers"),
        ("3 +", "not an arithmetic expression"),
        ("", "not an arithmetic expression"),
        ("x", "'x' is not arithmetic"),
        ("True", "'True' is not arithmetic"),
        ("1, 2", "is not arithmetic"),
        ("'a'*3", "is not arithmetic"),
        ("1 if 1 else 2", "is not arithmetic"),
        ("[1 for i in range(3)]", "is not arithmetic"),
        ("__import__('os').system('true')", "is not arithmetic"),
        ("(1).__class__", "is not arithmetic"),
        ("max(1, key=abs)", "is not arithmetic"),
        ("open('/etc/passwd')", "is not arithmetic"),
        ("1" * 1001, "at most 1000 characters"),
        ("(" * 400 + "1" + ")" * 400, "not an arithmetic expression"),
    ],
)
def test_anything_else_is_refused_with_a_reason(expression: str, reason: str) -> None:
    with pytest.raises(ValueError, match=None) as caught:
        calculator(expression)
    assert reason in str(caught.value)
