"""Small Python tasks with asserts (MBPP, CC-BY 4.0) as prompts: python data_preprocess/mbpp.py --local_dir data/mbpp.

From the hub, or with --source from a folder with the authors' mbpp.jsonl, which is split by task as they say (11 to 510
test, 601 to 974 train; 1 to 10 and 511 to 600 are left for examples and validation). The reference answer is JSON:
{"functional": CODE}, where CODE is to be run behind the response and raises where that is wrong.
"""

from __future__ import annotations

import json
from functools import partial

from dagrl.data.prepare import QUESTION_INFO, DataSet, Drop, Field, Original, Record, asked, run, usual_files
from dagrl.data.prompt_file import PromptRow

HUB_NAME = "google-research-datasets/mbpp"
INSTRUCTION = "Write it in Python, in one markdown code block."
TASKS = {"train": range(601, 975), "test": range(11, 511)}


def make_row(record: Record, instruction: str) -> PromptRow | Drop | None:
    """The task with one of its asserts, which shows the function's name; all of them judge the response."""
    if record["task_id"] not in TASKS[record.split]:
        return None
    task = record["text"].strip()
    tests = [*record["test_list"], *(record.get("challenge_test_list") or [])]
    if not task:
        return Drop("no task")
    if not tests or not all(isinstance(test, str) and test.strip() for test in tests):
        return Drop("no tests")
    setup = (record.get("test_setup_code") or "").strip()
    code = "\n".join([*([setup] if setup else []), *tests])
    try:
        compile(code, record.place, "exec")
    except (SyntaxError, ValueError):
        return Drop("tests that are not Python")
    extra_info = record.info(task, record.get("code") or "", index=record["task_id"])
    prompt = f"{asked(task, instruction)}\nIt will be tested like this:\n```python\n{tests[0]}\n```"
    return PromptRow(HUB_NAME, prompt, json.dumps({"functional": code}, ensure_ascii=False), extra_info, "code")


MBPP = DataSet(
    name="mbpp",
    title=__doc__ or "",
    originals={
        split: Original(HUB_NAME, ("mbpp.jsonl", *usual_files(split, f"full/{split}-*.parquet")), config="full")
        for split in TASKS
    },
    fields={
        "task_id": Field((int,)),
        "text": Field((str,)),
        "test_list": Field((list,)),
        "challenge_test_list": Field((list, type(None)), needed=False),
        "test_setup_code": Field((str, type(None)), needed=False),
        "code": Field((str, type(None)), needed=False),
    },
    make_row=make_row,
    extra_info=QUESTION_INFO,
    instruction=INSTRUCTION,
)

main = partial(run, MBPP)

if __name__ == "__main__":
    main()
