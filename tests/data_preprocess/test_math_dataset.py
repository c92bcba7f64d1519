"""math_dataset.py: the authors' folder of one file for each problem, and the boxed answers."""

from __future__ import annotations

import pytest

from dagrl.data.prepare import answer_text, last_boxed


def problem(text: str, solution: str) -> dict[str, str]:
    return {"problem": text, "level": "Level 5", "type": "Algebra", "solution": solution}


def test_the_authors_folder_is_read_in_order(originals, prepared, capsys) -> None:
    files = {
        f"train__algebra__{number}_DOT_json": problem(f"Problem {number}?", f"So $\\boxed{{\\frac{{{number}}}{{7}}}}$.")
        for number in (10, 2)
    }
    files["train__geometry__1_DOT_json"] = problem("No box?", "It is 5.")
    files["test__algebra__1_DOT_json"] = problem("Set?", r"$\boxed{\{1, 2\}}$")
    rows = prepared("math_dataset", originals(**files))
    assert [(row["extra_info"]["question"], row["reward_model"]["ground_truth"]) for row in rows["train"]] == [
        ("Problem 2?", r"\frac{2}{7}"),
        ("Problem 10?", r"\frac{10}{7}"),
    ]
    (test,) = rows["test"]
    assert test["reward_model"]["ground_truth"] == r"\{1, 2\}"
    assert test["data_source"] == "DigitalLearningGmbH/MATH-lighteval"
    assert test["extra_info"] == {
        "split": "test",
        "index": 0,
        "question": "Set?",
        "answer": r"$\boxed{\{1, 2\}}$",
        "level": "Level 5",
        "type": "Algebra",
    }
    assert "dropped 1: no boxed answer in the solution" in capsys.readouterr().out


def test_the_hubs_parquet_files_are_read(originals, prepared) -> None:
    rows = [problem("1?", r"\boxed{1}")]
    folder = originals(
        **{f"data__{split}-00000-of-00001_DOT_parquet": rows for split in ("train", "test")},
    )
    assert [row["reward_model"]["ground_truth"] for row in prepared("math_dataset", folder)["train"]] == ["1"]


@pytest.mark.parametrize(
    ("solution", "answer"),
    [
        (r"\boxed{1} and then \boxed{2}", "2"),
        (r"\fbox{a} is $\boxed 7$.", "7"),
        (r"$x=\boxed 12$, so $y=1$.", "12"),
        (r"$\boxed\frac12$", r"\frac12"),
        (r"$\boxed 1 \ne \boxed{2}$", "2"),
        (r"\[\boxed 0.5. \]", "0.5"),
        (r"\begin{align*}x&=\boxed\pi\end{align*}", r"\pi"),
        ("It is \\boxed -3.\nIndeed.", "-3"),
        (r"\boxed{ \text{a}\{ b }", r"\text{a}\{ b"),
        (r"\boxed{\left\{ x \right.}", r"\left\{ x \right."),
        (r"\boxed{never closed", None),
        (r"\boxed{1} but \boxed{2", None),
        (r"\boxed{}", ""),
        ("nothing", None),
    ],
)
def test_the_last_box_counts(solution: str, answer: str | None) -> None:
    assert last_boxed(solution) == answer


@pytest.mark.parametrize(
    ("given", "text"),
    [(142.0, "142"), (0.0, "0"), (0.5, "0.5"), (-3, "-3"), (None, ""), (" 7\n", "7"), (float("inf"), "inf")],
)
def test_answers_become_text(given: object, text: str) -> None:
    assert answer_text(given) == text
