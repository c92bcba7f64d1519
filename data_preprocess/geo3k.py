"""Geometry questions with figures (Geometry3K, MIT licence): python data_preprocess/geo3k.py --local_dir data/geo3k.

From the hub, or with --source from a clone of its repository (data/train-*.parquet, data/test-*.parquet). The figures
are kept as they are, in a column `images` of {bytes, path}, where verl looks for them; `<image>` marks their place in
the prompt.
"""

from __future__ import annotations

from functools import partial

import pyarrow as pa

from dagrl.data.prepare import QUESTION_INFO, DataSet, Drop, Field, Original, Record, asked, run, usual_files
from dagrl.data.prompt_file import PromptRow

HUB_NAME = "hiyouga/geometry3k"
INSTRUCTION = (
    "Think about the problem first, within <think> </think> tags, and then put the final answer within \\boxed{}."
)


def make_row(record: Record, instruction: str) -> PromptRow | Drop:
    question, answer, images = record["problem"].strip(), record["answer"].strip(), record["images"]
    for image in images:
        if not (isinstance(image, dict) and isinstance(image.get("bytes"), bytes)):
            raise ValueError(
                f"{record.place}: one of 'images' is not {{bytes, path}}; give the hub's own parquet files"
            )
    if not question:
        return Drop("no question")
    if not answer:
        return Drop("no answer")
    if question.count("<image>") != len(images):
        return Drop("other figures than <image> marks")
    extra_info = record.info(question, answer)
    kept = [{"bytes": image["bytes"], "path": image.get("path")} for image in images]
    return PromptRow(HUB_NAME, asked(question, instruction), answer, extra_info, columns={"images": kept})


GEO3K = DataSet(
    name="geo3k",
    title=__doc__ or "",
    originals={split: Original(HUB_NAME, usual_files(split)) for split in ("train", "test")},
    fields={"problem": Field((str,)), "answer": Field((str,)), "images": Field((list,))},
    make_row=make_row,
    extra_info=QUESTION_INFO,
    instruction=INSTRUCTION,
    columns={"images": pa.list_(pa.struct({"bytes": pa.binary(), "path": pa.string()}))},
    rows_per_group=128,
)

main = partial(run, GEO3K)

if __name__ == "__main__":
    main()
