"""mbpp.py and apps.py: tests as JSON in the reference answer."""

from __future__ import annotations

import json

import pytest

from dagrl.rewards.code.reward import code_reward


def truths(rows: list[dict]) -> list[dict]:
    return [json.loads(row["reward_model"]["ground_truth"]) for row in rows]


def mbpp(task: int, **more: object) -> dict:
    return {
        "task_id": task,
        "text": "Write a function to add.",
        "code": "def add(a, b):\n    return a + b",
        "test_list": ["assert add(1, 2) == 3", "assert add(0, 0) == 0"],
        "test_setup_code": "",
        "challenge_test_list": [],
        **more,
    }


def test_mbpps_single_file_is_split_by_task(originals, prepared, capsys) -> None:
    tasks = [mbpp(task) for task in (1, 10, 11, 510, 511, 600, 601, 974)]
    rows = prepared("mbpp", originals(mbpp_DOT_jsonl=tasks))
    assert {split: [row["extra_info"]["index"] for row in kept] for split, kept in rows.items()} == {
        "train": [601, 974],
        "test": [11, 510],
    }
    assert "train.parquet: 2 rows\n" in capsys.readouterr().out


def test_mbpps_asserts_judge_a_solution(originals, prepared, capsys) -> None:
    tasks = [
        mbpp(601, test_setup_code="import math", challenge_test_list=["assert add(-math.inf, 1) < 0"]),
        mbpp(602, test_list=["assert add(1"]),
        mbpp(603, test_list=[]),
        mbpp(604, test_list=["assert add(1, 2) == 3", " "]),
        mbpp(605, text=" "),
    ]
    (row,) = prepared("mbpp", originals(train_DOT_jsonl=tasks), "--splits", "train")["train"]
    assert row["ability"] == "code"
    assert row["prompt"][0]["content"].endswith("like this:\n```python\nassert add(1, 2) == 3\n```")
    (truth,) = truths([row])
    assert list(truth) == ["functional"]
    exec(row["extra_info"]["answer"] + "\n" + truth["functional"], {})
    with pytest.raises(AssertionError):
        exec("def add(a, b):\n    return abs(a) + b\n" + truth["functional"], {})
    block = f"```python\n{row['extra_info']['answer']}\n```"
    assert code_reward(block, row["reward_model"]["ground_truth"]) == 1.0
    assert code_reward(block.replace("return a", "return abs(a)"), row["reward_model"]["ground_truth"]) == 0.0
    assert "dropped 1: tests that are not Python; dropped 2: no tests; dropped 1: no task" in capsys.readouterr().out


def apps(tests: object, **more: object) -> dict:
    return {"question": "Add them.", "input_output": tests if isinstance(tests, str) else json.dumps(tests), **more}


def test_apps_asks_for_a_program_or_a_function(originals, prepared) -> None:
    program = {"inputs": ["1 2\n", "é"], "outputs": ["3\n", "?"]}
    function = {"fn_name": "add", "inputs": [[1, 2]], "outputs": [[3]]}
    rows = [
        apps(program, solutions=json.dumps(["print(3)", "other"]), difficulty="interview", url="https://x"),
        apps(function, starter_code="def add(a, b):\n", solutions=["def add"]),
        apps(program, solutions="print(4)"),
        apps(program, solutions=[]),
    ]
    written = prepared("apps", originals(train_DOT_jsonl=rows, test_DOT_jsonl=rows[:1]))["train"]
    assert truths(written) == [program, function, program, program]
    first, second = (row["prompt"][0]["content"] for row in written[:2])
    assert first.endswith("Read from standard input and write to standard output.")
    assert second.endswith("Write a function named add.\nBegin with this:\n```python\ndef add(a, b):\n```")
    assert [row["extra_info"]["answer"] for row in written] == ["print(3)", "def add", "print(4)", ""]
    assert written[0]["extra_info"]["difficulty"] == "interview"


def test_apps_tasks_without_usable_tests_are_dropped(originals, prepared, capsys) -> None:
    bad = ["", "{", [1], {"inputs": [], "outputs": []}, {"inputs": ["1"], "outputs": []}, {"inputs": "1"}]
    rows = [apps(tests) for tests in bad] + [apps({"inputs": ["1"], "outputs": ["1"]}), {**apps(""), "question": ""}]
    written = prepared("apps", originals(train_DOT_jsonl=rows), "--splits", "train")["train"]
    assert [row["extra_info"]["index"] for row in written] == [6]
    out = capsys.readouterr().out
    for drop in (
        "dropped 2: no tests",
        "dropped 1: tests that are not JSON",
        "dropped 3: tests that are not pairs of input and output",
        "dropped 1: no task",
    ):
        assert drop in out


def test_the_code_reward_confirms_reference_solutions(originals, prepared) -> None:
    program = {"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7\n"]}
    function = {"fn_name": "add", "inputs": [[1, 2], [3, 4]], "outputs": [[3], [7]]}
    adds = "def add(a, b):\n    return a + b"
    tasks = [
        apps(program, solutions=["print(sum(map(int, input().split())))"]),
        apps(function, solutions=json.dumps([adds])),
    ]
    written = prepared("apps", originals(train_DOT_jsonl=tasks, test_DOT_jsonl=tasks[:1]))["train"]
    for row in written:
        block = f"```python\n{row['extra_info']['answer']}\n```"
        assert code_reward(block, row["reward_model"]["ground_truth"]) == 1.0
