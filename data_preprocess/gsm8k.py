"""Grade-school math questions (GSM8K, MIT licence) as prompts: python data_preprocess/gsm8k.py --local_dir data/gsm8k.

Takes them from the Hugging Face hub, or with --source from a folder with the authors' own train.jsonl and test.jsonl,
and writes train.parquet and test.parquet in verl's schema.
"""

from __future__ import annotations

from functools import partial

from dagrl.data.prepare import QUESTION_INFO, DataSet, Drop, Field, Original, Record, asked, run, usual_files
from dagrl.data.prompt_file import PromptRow

HUB_NAME = "openai/gsm8k"
INSTRUCTION = 'Think step by step, and put the final answer, a number, after "####".'


def make_row(record: Record, instruction: str) -> PromptRow | Drop:
    """The question with the instruction; the answer is what follows the last ``####``, without its commas."""
    question, solution = record["question"].strip(), record["answer"]
    answer = solution.rpartition("####")[2].strip().replace(",", "") if "####" in solution else ""
    if not question:
        return Drop("no question")
    if not answer:
        return Drop('no final answer after "####"')
    extra_info = record.info(question, solution)
    return PromptRow(HUB_NAME, asked(question, instruction), answer, extra_info)


GSM8K = DataSet(
    name="gsm8k",
    title=__doc__ or "",
    originals={
        split: Original(HUB_NAME, usual_files(split, f"main/{split}-*.parquet"), config="main")
        for split in ("train", "test")
    },
    fields={"question": Field((str,)), "answer": Field((str,))},
    make_row=make_row,
    extra_info=QUESTION_INFO,
    instruction=INSTRUCTION,
)

main = partial(run, GSM8K)

if __name__ == "__main__":
    main()
