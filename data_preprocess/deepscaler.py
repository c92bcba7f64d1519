"""Contest math (DeepScaleR, MIT licence) as prompts: python data_preprocess/deepscaler.py --local_dir data/deepscaler.

Training questions come from the hub's DeepScaleR-Preview, the test is MATH-500. With --source, a folder with the
authors' train/*.json and test/*.json (AIME, AMC, MATH-500, Minerva, OlympiadBench): data_source then says which of them
a question is from, as in deepscaler/test/aime, so that each is validated by itself.
"""

from __future__ import annotations

import json
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
    answer_text,
    asked,
    run,
    usual_files,
)
from dagrl.data.prompt_file import PromptRow

HUB_NAME = "agentica-org/DeepScaleR-Preview-Dataset"
TEXT_OR_TEXTS = Field((str, list, type(None)), needed=False)


def make_row(record: Record, instruction: str) -> PromptRow | Drop:
    """The question with the instruction. Where the authors give several writings of the answer, the first counts."""
    question = (record["problem"] or "").strip()
    given = record["answer"] if isinstance(record["answer"], list) else [record["answer"]]
    answers = [text for text in map(answer_text, given) if text]
    if not question:
        return Drop("no question")
    if not answers:
        return Drop("no answer")
    solution = record.get("solution") or ""
    others = {key: value for key, value in record.values.items() if key not in ("problem", "answer", "solution")}
    extra_info = record.info(
        question,
        solution if isinstance(solution, str) else "\n\n".join(map(answer_text, solution)),
        answers=answers,
        difficulty=record.get("difficulty"),
        original=json.dumps(others, ensure_ascii=False),
    )
    source = record.part if "/" in record.part else f"deepscaler/{record.split}/{record.part}"
    return PromptRow(source, asked(question, instruction), answers[0], extra_info)


DEEPSCALER = DataSet(
    name="deepscaler",
    title=__doc__ or "",
    originals={
        "train": Original(HUB_NAME, ("train/*.json", *usual_files("train", "deepscaler.json"))),
        "test": Original("HuggingFaceH4/MATH-500", ("test/*.json", *usual_files("test"))),
    },
    fields={
        "problem": Field((str, type(None))),
        "answer": Field((str, int, float, list, type(None))),
        "solution": TEXT_OR_TEXTS,
        "difficulty": Field((int, float, type(None)), needed=False),
    },
    make_row=make_row,
    extra_info={
        **QUESTION_INFO,
        "answers": pa.list_(pa.string()),
        "difficulty": pa.float64(),
        "original": pa.string(),
    },
    instruction=BOXED_INSTRUCTION,
)

main = partial(run, DEEPSCALER)

if __name__ == "__main__":
    main()
