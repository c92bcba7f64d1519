"""Contest programming with tests (APPS, MIT licence) as prompts: python data_preprocess/apps.py --local_dir data/apps.

From the hub, or with --source from a folder with train.jsonl and test.jsonl; files of TACO have the same fields. The
reference answer is JSON: {"inputs": [...], "outputs": [...]}, and "fn_name" where a function is called instead of a
program fed through its standard input.
"""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import pyarrow as pa

from dagrl.data.prepare import QUESTION_INFO, DataSet, Drop, Field, Original, Record, asked, run, usual_files
from dagrl.data.prompt_file import PromptRow

HUB_NAME = "codeparrot/apps"
INSTRUCTION = "Solve the task in Python, in one markdown code block."


def make_row(record: Record, instruction: str) -> PromptRow | Drop:
    task = record["question"].strip()
    if not task:
        return Drop("no task")
    tests = _tests(record["input_output"])
    if isinstance(tests, Drop):
        return tests
    how = "Read from standard input and write to standard output."
    if "fn_name" in tests:
        how = f"Write a function named {tests['fn_name']}."
    starter = (record.get("starter_code") or "").strip()
    begin = f"\nBegin with this:\n```python\n{starter}\n```" if starter else ""
    solution = _first_solution(record.get("solutions"))
    extra_info = record.info(task, solution, difficulty=record.get("difficulty"), url=record.get("url"))
    prompt = f"{asked(task, instruction)} {how}{begin}"
    return PromptRow(HUB_NAME, prompt, json.dumps(tests, ensure_ascii=False), extra_info, "code")


def _tests(text: str | None) -> dict[str, Any] | Drop:
    """Inputs and outputs in pairs, and the function's name if there is one."""
    if not (text or "").strip():
        return Drop("no tests")
    try:
        tests = json.loads(text or "")
    except (ValueError, RecursionError):
        return Drop("tests that are not JSON")
    if not isinstance(tests, dict):
        return Drop("tests that are not pairs of input and output")
    inputs, outputs = tests.get("inputs"), tests.get("outputs")
    if not (isinstance(inputs, list) and isinstance(outputs, list) and len(inputs) == len(outputs)):
        return Drop("tests that are not pairs of input and output")
    if not inputs:
        return Drop("no tests")
    name = tests.get("fn_name")
    return {"inputs": inputs, "outputs": outputs, **({"fn_name": name} if isinstance(name, str) and name else {})}


def _first_solution(solutions: Any) -> str:
    """APPS holds them as JSON in a text, TACO's copies also as a list."""
    if isinstance(solutions, str):
        try:
            solutions = json.loads(solutions)
        except (ValueError, RecursionError):
            return solutions
    return str(solutions[0]) if isinstance(solutions, list) and solutions else ""


APPS = DataSet(
    name="apps",
    title=__doc__ or "",
    originals={split: Original(HUB_NAME, usual_files(split), by_file=True) for split in ("train", "test")},
    fields={
        "question": Field((str,)),
        "input_output": Field((str, type(None))),
        "starter_code": Field((str, type(None)), needed=False),
        "solutions": Field((str, list, type(None)), needed=False),
        "difficulty": Field((str, type(None)), needed=False),
        "url": Field((str, type(None)), needed=False),
    },
    make_row=make_row,
    extra_info={
        **QUESTION_INFO,
        "difficulty": pa.string(),
        "url": pa.string(),
    },
    instruction=INSTRUCTION,
    # Some tasks bring megabytes of tests.
    rows_per_group=256,
)

main = partial(run, APPS)

if __name__ == "__main__":
    main()
