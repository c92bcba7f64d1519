"""Values leave the sandbox unchanged, and forged ones are errors."""

from __future__ import annotations

import json
from collections import Counter, OrderedDict, namedtuple
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagrl.rewards.code.assert_harness import encoded
from dagrl.rewards.code.tests import decoded

HASHABLE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=3),
    max_leaves=6,
)
ANY = st.recursive(
    HASHABLE | st.complex_numbers(allow_nan=False),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(HASHABLE, inner, max_size=3) | st.sets(HASHABLE, max_size=3)
    ),
    max_leaves=8,
)


def through(value: Any) -> Any:
    return decoded(json.loads(json.dumps(encoded(value))))


@given(ANY)
def test_values_of_pythons_own_types_come_through(value: Any) -> None:
    assert through(value) == value
    assert type(through(value)) is type(value)


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (Counter("aab"), {"a": 2, "b": 1}),
        (OrderedDict(a=1), {"a": 1}),
        (namedtuple("Pair", "a b")(1, 2), (1, 2)),
        (np.int64(3), 3),
        (np.array([[1.5]]), [[1.5]]),
    ],
)
def test_subclasses_are_sent_as_plain_values(value: Any, plain: Any) -> None:
    assert through(value) == plain
    assert type(through(value)) is type(plain)


def test_an_object_that_equals_everything_is_no_value() -> None:
    class Always:
        def __eq__(self, other: object) -> bool:
            return True

    class Number(int):
        def __eq__(self, other: object) -> bool:
            return True

    with pytest.raises(TypeError, match="no value of Python's own types"):
        encoded(Always())
    assert through(Number(3)) == 3
    assert through(Number(3)) != 4


@pytest.mark.parametrize(
    "forged",
    [
        {},
        [],
        ["eval", "1"],
        [1],
        [["list"]],
        ["set", ["list"]],
        ["dict", 1],
        ["bytes"],
        ["bytes", 1],
        ["bytes", "a", "b"],
        ["bytes", "\u0100"],
        ["complex", "x"],
    ],
)
def test_forged_data_is_an_error(forged: Any) -> None:
    with pytest.raises((ValueError, TypeError)):
        decoded(forged)
