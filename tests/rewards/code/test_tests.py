"""Reference answers in the forms that data sets of code have."""

from __future__ import annotations

import json

import pytest

from dagrl.rewards.code.assert_harness import VALUE
from dagrl.rewards.code.tests import AssertTests, Check, FunctionTests, ProgramTests, read_tests


@pytest.mark.parametrize(
    ("answer", "tests"),
    [
        (
            {"inputs": ["1\n", ["2", 3]], "outputs": ["1\n", ["2", 3]]},
            ProgramTests(("1\n", "2\n3"), ("1\n", "2\n3")),
        ),
        ({"inputs": ["1"], "outputs": ["1"], "fn_name": None}, ProgramTests(("1",), ("1",))),
        (
            {"fn_name": "f", "inputs": [[1, "a"], '[1]\n"b"\n'], "outputs": [[2], '"c"']},
            FunctionTests("f", ([1, "a"], [[1], "b"]), (([2],), ("c", '"c"'))),
        ),
        ({"fn_name": "f", "inputs": [["x"]], "outputs": ["not JSON"]}, FunctionTests("f", (["x"],), (("not JSON",),))),
        (
            {"functional": "import math\nassert f(1) == (1, [2])\nx = 3\nassert f(x), 'no'"},
            AssertTests(
                (
                    Check("import math\n_value_of_the_test = f(1)", shows=True, expected=(1, [2])),
                    Check("import math\nx = 3\nassert f(x), 'no'"),
                )
            ),
        ),
        (
            ["assert a\nassert f() == 1\nfor x in 2, 3:\n    check(x)"],
            AssertTests(
                (
                    Check("assert a"),
                    Check(f"{VALUE} = f()\nfor x in (2, 3):\n    check(x)", shows=True, expected=1),
                )
            ),
        ),
        (["assert a\ncheck(f)"], AssertTests((Check("assert a\ncheck(f)"),))),
        ({"functional": "assert -1 == f()"}, AssertTests((Check(f"{VALUE} = f()", shows=True, expected=-1),))),
        (
            {"functional": "assert set(f()) == set((4, 5))"},
            AssertTests((Check(f"{VALUE} = set(f())", shows=True, expected={4, 5}),)),
        ),
        ({"functional": "assert f() == set(g())"}, AssertTests((Check("assert f() == set(g())"),))),
        ({"functional": "assert f() == set(3)"}, AssertTests((Check("assert f() == set(3)"),))),
        ({"functional": "assert f() == g()"}, AssertTests((Check("assert f() == g()"),))),
        ({"functional": "check(f)\n"}, AssertTests((Check("check(f)\n"),))),
        (
            {"inputs": [], "outputs": [], "assert_case": ["assert a", "assert b"]},
            AssertTests((Check("assert a"), Check("assert b"))),
        ),
        (["assert a is None"], AssertTests((Check("assert a is None"),))),
    ],
)
def test_known_forms_are_read(answer: object, tests: object) -> None:
    assert read_tests(json.dumps(answer)) == tests


@pytest.mark.parametrize(
    ("answer", "what"),
    [
        ("42 is no test", "is not JSON"),
        ("42", "is neither an object nor a list"),
        ("{}", "has neither inputs and outputs nor asserts"),
        ('{"inputs": ["1"], "outputs": "1"}', "has neither inputs and outputs nor asserts"),
        ('{"inputs": [], "outputs": []}', "has 0 inputs and 0 outputs"),
        ('{"inputs": ["1"], "outputs": []}', "has 1 inputs and 0 outputs"),
        ('{"functional": 3}', "has asserts that are not texts of code"),
        ('["assert f("]', "has asserts that Python cannot read ("),
        ("[]", "has asserts that are not texts of code"),
        ('{"fn_name": "f", "inputs": ["[1"], "outputs": [1]}', "has the arguments '[1', which are not JSON"),
    ],
)
def test_an_answer_without_tests_is_refused_with_a_sentence(answer: str, what: str) -> None:
    with pytest.raises(ValueError, match="the reference answer ") as error:
        read_tests(answer)
    assert what in str(error.value)
    assert "docs/rewards.md" in str(error.value)
