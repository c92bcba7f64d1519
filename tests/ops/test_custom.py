"""The user's own ops: how they see columns, what they may return, and what is said where it is wrong."""

from __future__ import annotations

import numpy as np
import pytest

from dagrl.data.batch import Column
from dagrl.ops.base import OpInput, Output
from dagrl.ops.custom import custom_op

HEADER = "import numpy as np\n\nimport dagrl\n\n"


@pytest.fixture
def run_op(bench, request):
    """Run a function with this body and header on some parts; modules are named after the test."""
    module = f"ops_of_{abs(hash(request.node.name))}"

    def run(parts: list[OpInput], body: str, *, reads: list[str], writes: list[str], **args) -> list[Output]:
        names = "".join(f", {name}" for name in args)
        decorator = f"@dagrl.node(reads={reads}, writes={writes})\n"
        bench.write_module(module, f"{HEADER}{decorator}def op(batch{names}):\n    {body}\n")
        place = f"{module}:op"
        nodes = {"mine": {"op": place, "args": args}}
        return list(custom_op(place, bench.folder)(parts, bench.context("mine", nodes=nodes)))

    return run


def rows_of(column: Column) -> list:
    return [np.asarray(column[row]).tolist() for row in range(len(column))]


@pytest.fixture
def part(bench) -> OpInput:
    batch = bench.batch(
        [3, 5],
        group_id=[1, 2],
        response_tokens=["12", "345"],
        old_logprob=[[-1, -2], [-3, -4, -5]],
        answer=["12", "Größe"],
    )
    return OpInput(1, batch)


def test_columns_are_arrays_or_lists_of_arrays_or_strings(run_op, part) -> None:
    body = (
        "assert isinstance(batch['group_id'], np.ndarray) and batch['group_id'].tolist() == [1, 2]; "
        "assert [type(each) for each in batch['old_logprob']] == [np.ndarray] * 2; "
        "assert [each.tolist() for each in batch['old_logprob']] == [[-1, -2], [-3, -4, -5]]; "
        "assert batch['response_tokens'][1].dtype == np.int64; "
        "assert batch['answer'] == ['12', 'Größe']; "
        "return {}"
    )
    (output,) = run_op([part], body, reads=[], writes=[])
    assert (output.shards, output.rows.tolist(), output.columns) == ((1,), [3, 5], {})


def test_args_of_the_node_are_given_by_name(run_op, part) -> None:
    body = "return {'score': batch['group_id'] * factor + offset}"
    (output,) = run_op([part], body, reads=["group_id"], writes=["score"], factor=2, offset=0.5)
    assert output.columns["score"].values.tolist() == [2.5, 4.5]


def test_each_shard_is_a_call_of_its_own(run_op, bench) -> None:
    parts = [OpInput(index, bench.batch(rows, group_id=rows)) for index, rows in enumerate(([0, 1], [2]))]
    outputs = run_op(
        parts, "return {'size': [len(batch['group_id'])] * len(batch['group_id'])}", reads=[], writes=["size"]
    )
    assert [output.columns["size"].values.tolist() for output in outputs] == [[2, 2], [1]]
    assert [output.shards for output in outputs] == [(0,), (1,)]


@pytest.mark.parametrize(
    ("name", "returned", "rows", "dtype"),
    [
        ("reward", "[1, 0]", [1, 0], "float32"),
        ("reward", "np.array([0.5, 2.0])", [0.5, 2], "float32"),
        ("policy_version", "[4, 5]", [4, 5], "int64"),
        ("advantage", "[[1, 2], np.ones(3)]", [[1, 2], [1, 1, 1]], "float32"),
        ("advantage", "np.zeros((2, 3))", [[0, 0, 0], [0, 0, 0]], "float32"),
        ("advantage", "[[], []]", [[], []], "float32"),
        ("response_tokens", "[[7], [8, 9]]", [[7], [8, 9]], "int64"),
        ("my_score", "[1, 2]", [1, 2], "float32"),
        ("my_weights", "[[1], [2, 3]]", [[1], [2, 3]], "float32"),
    ],
)
def test_a_functions_result_becomes_a_column_of_the_known_kind(run_op, part, name, returned, rows, dtype) -> None:
    (output,) = run_op([part], f"return {{{name!r}: {returned}}}", reads=[], writes=[name])
    assert rows_of(output.columns[name]) == rows
    assert output.columns[name].values.dtype == dtype


@pytest.mark.parametrize("name", ["answer", "my_text"])
def test_strings_become_a_column_of_text(run_op, part, name: str) -> None:
    (output,) = run_op([part], f"return {{{name!r}: ['zwölf', '']}}", reads=[], writes=[name])
    assert output.columns[name].strings() == ["zwölf", ""]


def test_no_rows_become_a_column_of_the_known_kind(run_op, bench) -> None:
    body = "return {'answer': [], 'advantage': [], 'reward': []}"
    names = ["answer", "advantage", "reward"]
    (output,) = run_op([OpInput(0, bench.batch([], group_id=[]))], body, reads=[], writes=names)
    assert {name: len(column) for name, column in output.columns.items()} == dict.fromkeys(names, 0)
    assert output.columns["reward"].offsets is None
    assert output.columns["advantage"].offsets is not None
    assert output.columns["answer"].strings() == []


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ("{'bonus': [1, 2]}", "must return a dict with the columns it writes: reward, bonus"),
        ("{'reward': [1, 2], 'bonus': [1, 2], 'more': [1, 2]}", "must return a dict"),
        ("[1, 2]", "must return a dict"),
        ("None", "must return a dict"),
        ("{'reward': [1, 2], 'bonus': [1]}", "returned 1 value of 'bonus' for 2 rows"),
        (
            "{'reward': [1, 2], 'bonus': __import__('itertools').count()}",
            "returned too many values of 'bonus' for 2 rows",
        ),
        ("{'reward': [1, 2], 'bonus': []}", "returned 0 values of 'bonus' for 2 rows"),
        ("{'reward': [1, 2], 'bonus': 0.5}", "returned 0.5 as 'bonus'; return a value for each of the 2 rows"),
        ("{'reward': [1, 2], 'bonus': np.array(0.5)}", "return a value for each of the 2 rows"),
        ("{'reward': ['a', 'b'], 'bonus': [1, 2]}", "returned values of 'reward' that are not float32 per sample"),
        ("{'reward': [[1, 2], [3]], 'bonus': [1, 2]}", "'reward' that are not float32 per sample"),
        ("{'reward': [[1], [3]], 'bonus': [1, 2]}", "'reward' that are not float32 per sample"),
        ("{'reward': [1, 2], 'bonus': [1, [2]]}", "'bonus' that are not float32 per sample"),
        ("{'reward': [1, 2], 'bonus': [[1], 2]}", "'bonus' that are not float32 per response token"),
        ("{'reward': [1, 2], 'bonus': ['one', 2]}", "'bonus' that are not text"),
    ],
)
def test_results_that_are_no_column_are_refused_with_the_functions_name(
    run_op, part, returned: str, message: str
) -> None:
    with pytest.raises(ValueError, match=rf"^ops_of_\d+:op \(.*ops_of_\d+\.py:\d+\) .*{message}"):
        run_op([part], f"return {returned}", reads=[], writes=["reward", "bonus"])


@pytest.mark.parametrize("error", ["RuntimeError", "SystemExit", "KeyboardInterrupt"])
def test_an_exception_of_a_function_is_reported_with_its_line(run_op, part, error: str) -> None:
    with pytest.raises(ValueError, match=rf"^ops_of_\d+:op raised {error}: out of ideas \(.*ops_of_\d+\.py:7\)$"):
        run_op([part], f"raise {error}('out of ideas')", reads=[], writes=["reward"])


@pytest.mark.parametrize("returned", ["[1, 2]", "[[1], [[2]]]"])
def test_a_column_of_tokens_requires_a_list_for_each_row(run_op, part, returned: str) -> None:
    with pytest.raises(ValueError, match="'advantage' that are not float32 per response token"):
        run_op([part], f"return {{'advantage': {returned}}}", reads=[], writes=["advantage"])


@pytest.mark.parametrize(
    ("name", "returned"),
    [
        ("policy_version", "[1, 0.5]"),
        ("policy_version", "[1, float('nan')]"),
        ("policy_version", "[1, 2 ** 70]"),
        ("token_turn", "[[1], [70_000]]"),
        ("response_tokens", "[[1], np.array([2.5])]"),
    ],
)
def test_whole_numbers_are_not_cut_to_fit(run_op, part, name: str, returned: str) -> None:
    with pytest.raises(ValueError, match=rf"returned values of '{name}' that are not int\d\d per "):
        run_op([part], f"return {{{name!r}: {returned}}}", reads=[], writes=[name])
