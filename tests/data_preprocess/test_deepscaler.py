"""deepscaler.py: the sources stay apart, several writings of an answer, rows that cannot be judged."""

from __future__ import annotations

import json

import pytest

from dagrl.rewards.math import math_reward

MATH = [
    {"problem": "What is $1+1$?", "answer": "2", "difficulty": 1.0, "type": "Algebra"},
    {"problem": "What?", "answer": None, "difficulty": 3.0, "type": "Algebra"},
    {"problem": "Where?", "answer": "", "difficulty": 3.0, "type": "Algebra"},
    {"problem": " ", "answer": "2", "difficulty": 3.0, "type": "Algebra"},
]
AIME = [{"problem": "A walk?", "answer": "204", "solution": r"\boxed{204}", "difficulty": 6.5, "year": 2024}]
AMC = [{"problem": "A sum?", "answer": 142.0, "url": "https://x", "difficulty": 2.0}]
MINERVA = [
    {"problem": "Minus a third?", "answer": ["-\\frac{1}{3}\n", "-1/3\n"], "solution": "s", "type": "t", "idx": 0}
]
OLYMPIAD = [{"problem": "All?", "answer": ["$1,3,5$"], "solution": ["So.", "Or so."], "id": 1, "unit": None}]


@pytest.fixture
def rows(originals, prepared):
    folder = originals(
        train__math_DOT_json=MATH,
        train__aime_DOT_json=AIME,
        test__amc_DOT_json=AMC,
        test__minerva_DOT_json=MINERVA,
        test__olympiad_bench_DOT_json=OLYMPIAD,
    )
    return prepared("deepscaler", folder)


def test_questions_keep_the_name_of_their_file(rows, capsys) -> None:
    assert [(row["data_source"], row["reward_model"]["ground_truth"]) for row in rows["train"]] == [
        ("deepscaler/train/aime", "204"),
        ("deepscaler/train/math", "2"),
    ]
    assert [(row["data_source"], row["reward_model"]["ground_truth"]) for row in rows["test"]] == [
        ("deepscaler/test/amc", "142"),
        ("deepscaler/test/minerva", "-\\frac{1}{3}"),
        ("deepscaler/test/olympiad_bench", "$1,3,5$"),
    ]
    assert rows["train"][1]["prompt"] == [
        {
            "role": "user",
            "content": "What is $1+1$? Think step by step, and put the final answer within \\boxed{}.",
        }
    ]


def test_further_fields_of_the_authors_are_kept(rows) -> None:
    aime = rows["train"][0]["extra_info"]
    assert (aime["split"], aime["index"], aime["difficulty"], aime["answer"]) == ("train", 0, 6.5, r"\boxed{204}")
    assert json.loads(aime["original"]) == {"difficulty": 6.5, "year": 2024}
    minerva, olympiad = (row["extra_info"] for row in rows["test"][1:])
    assert minerva["answers"] == ["-\\frac{1}{3}", "-1/3"]
    assert olympiad["answer"] == "So.\n\nOr so."


def test_drops_are_counted(originals, prepared, capsys) -> None:
    prepared("deepscaler", originals(train__math_DOT_json=MATH), "--splits", "train")
    first = capsys.readouterr().out.splitlines()[0]
    assert first.endswith("train.parquet: 1 row; dropped 2: no answer; dropped 1: no question")


def test_the_math_reward_takes_the_reference_answers(rows) -> None:
    for row in [*rows["train"], *rows["test"]]:
        truth = row["reward_model"]["ground_truth"]
        assert math_reward(f"It is \\boxed{{{truth.strip('$')}}}.", truth) == 1.0


def test_a_field_of_the_wrong_type_is_named(originals, prepared) -> None:
    folder = originals(train__math_DOT_json=[{"problem": "p", "answer": {"a": 1}}])
    with pytest.raises(SystemExit, match=r"math\.json, row 0 .*: 'answer' is an object, not text or a whole number or"):
        prepared("deepscaler", folder)
