"""UltraFeedback as pairs (MIT licence): python data_preprocess/ultrafeedback.py --local_dir data/ultrafeedback.

From the hub, or with --source from a folder with train_prefs-*.parquet and test_prefs-*.parquet. Each row has the chat
before the answers as its prompt, and two answers in the columns `chosen` and `rejected`, the better first, for
`data.responses: [chosen, rejected]`. There is no reference answer.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pyarrow as pa

from dagrl.data.prepare import DataSet, Drop, Field, Original, Record, run, usual_files
from dagrl.data.prompt_file import PromptRow

HUB_NAME = "HuggingFaceH4/ultrafeedback_binarized"


def make_row(record: Record, instruction: str) -> PromptRow | Drop:
    del instruction  # the prompts are complete
    chats = [_chat(record, name) for name in ("chosen", "rejected")]
    (*prompt, chosen), (*other, rejected) = chats
    if prompt != other:
        return Drop("the answers are not to the same prompt")
    if not any(message["content"].strip() for message in prompt):
        return Drop("no question")
    if not chosen["content"].strip() or not rejected["content"].strip():
        return Drop("no answer")
    if chosen["content"] == rejected["content"]:
        return Drop("both answers are the same")
    scores = [record.get(f"score_{name}") for name in ("chosen", "rejected")]
    if None not in scores and scores[0] <= scores[1]:
        return Drop("the chosen answer has no higher score")
    answers = {"chosen": chosen["content"], "rejected": rejected["content"]}
    return PromptRow(HUB_NAME, prompt, "", {"split": record.split, "index": record.index}, "chat", answers)


def _chat(record: Record, name: str) -> list[dict[str, Any]]:
    messages = record[name]
    for message in messages:
        if not (isinstance(message, dict) and all(isinstance(message.get(key), str) for key in ("role", "content"))):
            raise ValueError(f"{record.place}: a message of {name!r} has no role or no content, which must be text")
    if not messages or messages[-1]["role"] != "assistant":
        raise ValueError(f"{record.place}: {name!r} does not end with a message of the assistant")
    return [{"role": message["role"], "content": message["content"]} for message in messages]


ULTRAFEEDBACK = DataSet(
    name="ultrafeedback",
    title=__doc__ or "",
    originals={
        split: Original(
            HUB_NAME,
            (f"data/{split}_prefs-*.parquet", f"{split}_prefs-*.parquet", *usual_files(split)),
            hub_split=f"{split}_prefs",
        )
        for split in ("train", "test")
    },
    fields={
        "chosen": Field((list,)),
        "rejected": Field((list,)),
        "score_chosen": Field((int, float, type(None)), needed=False),
        "score_rejected": Field((int, float, type(None)), needed=False),
    },
    make_row=make_row,
    extra_info={"split": pa.string(), "index": pa.int64()},
    columns={"chosen": pa.string(), "rejected": pa.string()},
)

main = partial(run, ULTRAFEEDBACK)

if __name__ == "__main__":
    main()
