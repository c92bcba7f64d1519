"""Contest questions for evaluation: a problem and a short answer, in test.parquet only."""

from __future__ import annotations

import pyarrow as pa

from dagrl.data.prepare.answers import BOXED_INSTRUCTION, answer_text, asked
from dagrl.data.prepare.dataset import QUESTION_INFO, DataSet, Drop, Field, Original, Record
from dagrl.data.prompt_file import PromptRow


def contest(name: str, title: str, data_source: str, original: Original) -> DataSet:
    """A contest whose rows have ``problem`` and ``answer``; `data_source` is the name its scores are shown under."""

    def make_row(record: Record, instruction: str) -> PromptRow | Drop:
        question, answer = record["problem"].strip(), answer_text(record["answer"])
        if not question:
            return Drop("no question")
        if not answer:
            return Drop("no answer")
        extra_info = record.info(question, answer_text(record.get("solution")), url=record.get("url"))
        return PromptRow(data_source, asked(question, instruction), answer, extra_info)

    return DataSet(
        name=name,
        title=title,
        originals={"test": original},
        fields={
            "problem": Field((str,)),
            "answer": Field((str, int, float, type(None))),
            "solution": Field((str, type(None)), needed=False),
            "url": Field((str, type(None)), needed=False),
        },
        make_row=make_row,
        extra_info={**QUESTION_INFO, "url": pa.string()},
        instruction=BOXED_INSTRUCTION,
        unique=True,
    )
