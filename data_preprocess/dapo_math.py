"""DAPO-Math-17k (Apache 2.0) as prompts, each once: python data_preprocess/dapo_math.py --local_dir data/dapo_math.

The authors' files are in verl's schema already, with each question about a hundred times (the test, AIME 2024, 32
times); here each is kept once, with its own prompt, which asks for "Answer: ...". From the hub, or with --source from a
folder with dapo-math-17k.parquet and aime-2024.parquet.
"""

from __future__ import annotations

from functools import partial

import pyarrow as pa

from dagrl.data.prepare import DataSet, Drop, Field, Original, Record, answer_text, run, usual_files
from dagrl.data.prompt_file import PromptRow


def make_row(record: Record, instruction: str) -> PromptRow | Drop:
    """The row as it is; its own index (a text) becomes extra_info.id."""
    del instruction  # it is in the prompts already
    messages = record["prompt"]
    for message in messages:
        if not (isinstance(message, dict) and all(isinstance(message.get(key), str) for key in ("role", "content"))):
            raise ValueError(f"{record.place}: a message of 'prompt' has no role or no content, which must be text")
    answer = answer_text(record["reward_model"].get("ground_truth"))
    if not any(message["content"].strip() for message in messages):
        return Drop("no question")
    if not answer:
        return Drop("no answer")
    own = record.get("extra_info") or {}
    extra_info = {"split": record.split, "index": record.index, "id": answer_text(own.get("index"))}
    return PromptRow(record["data_source"], messages, answer, extra_info, record.get("ability") or "MATH")


DAPO_MATH = DataSet(
    name="dapo_math",
    title=__doc__ or "",
    originals={
        "train": Original(
            "BytedTsinghua-SIA/DAPO-Math-17k",
            ("dapo-math-17k.parquet", "data/dapo-math-17k.parquet", *usual_files("train")),
            hub_split="train",
        ),
        "test": Original(
            "BytedTsinghua-SIA/AIME-2024",
            ("aime-2024.parquet", "data/aime-2024.parquet", *usual_files("test")),
            hub_split="train",
        ),
    },
    fields={
        "data_source": Field((str,)),
        "prompt": Field((list,)),
        "reward_model": Field((dict,)),
        "ability": Field((str, type(None)), needed=False),
        "extra_info": Field((dict, type(None)), needed=False),
    },
    make_row=make_row,
    extra_info={"split": pa.string(), "index": pa.int64(), "id": pa.string()},
    unique=True,
)

main = partial(run, DAPO_MATH)

if __name__ == "__main__":
    main()
