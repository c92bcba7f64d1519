"""MATH (Hendrycks et al., 2021, MIT licence) as prompts: python data_preprocess/math_dataset.py --local_dir data/math.

From the hub, or with --source from the authors' folder (train/SUBJECT/NUMBER.json and test/...), which may also hold
train.jsonl and test.jsonl with the same fields. The reference answer is what the solution boxes last.
"""

from __future__ import annotations

from functools import partial

import pyarrow as pa

from dagrl.data.prepare import (
    BOXED_INSTRUCTION,
    QUESTION_INFO,
    DataSet,
    Drop,
    Field,
    Original,
    Record,
    asked,
    last_boxed,
    run,
    usual_files,
)
from dagrl.data.prompt_file import PromptRow

HUB_NAME = "DigitalLearningGmbH/MATH-lighteval"


def make_row(record: Record, instruction: str) -> PromptRow | Drop:
    question, solution = record["problem"].strip(), record["solution"]
    answer = last_boxed(solution)
    if not question:
        return Drop("no question")
    if not answer:
        return Drop("no boxed answer in the solution")
    extra_info = record.info(question, solution, level=record.get("level"), type=record.get("type"))
    return PromptRow(HUB_NAME, asked(question, instruction), answer, extra_info)


MATH = DataSet(
    name="math_dataset",
    title=__doc__ or "",
    originals={
        "train": Original(HUB_NAME, usual_files("train"), config="default"),
        "test": Original(HUB_NAME, usual_files("test"), config="default"),
    },
    fields={
        "problem": Field((str,)),
        "solution": Field((str,)),
        "level": Field((str, type(None)), needed=False),
        "type": Field((str, type(None)), needed=False),
    },
    make_row=make_row,
    extra_info={
        **QUESTION_INFO,
        "level": pa.string(),
        "type": pa.string(),
    },
    instruction=BOXED_INSTRUCTION,
)

main = partial(run, MATH)

if __name__ == "__main__":
    main()
