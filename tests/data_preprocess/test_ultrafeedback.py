"""ultrafeedback.py: pairs of answers that pipelines learn from as they are."""

from __future__ import annotations

from typing import Any

import pytest

from dagrl.config.schema import TokenizerSpec
from dagrl.data.demonstrations import ResponseColumns
from dagrl.data.prompts import PromptLoader
from dagrl.model_files.tokenizer import make_tokenizer


def pair(chosen: str, rejected: str, question: str = "Why?", scores: tuple[float, float] = (8, 6)) -> dict[str, Any]:
    asked = {"role": "user", "content": question}
    return {
        "prompt": question,
        "chosen": [asked, {"role": "assistant", "content": chosen}],
        "rejected": [asked, {"role": "assistant", "content": rejected}],
        "score_chosen": scores[0],
        "score_rejected": scores[1],
    }


def test_pairs_come_with_the_chat_before_them(originals, prepared, tmp_path, capsys) -> None:
    rows = [
        pair("So.", "No."),
        pair("So.", "So."),
        pair("So.", "No.", scores=(5, 5)),
        pair("So.", " "),
        {**pair("So.", "No."), "rejected": pair("So.", "No.", "How?")["rejected"]},
        pair("Because.", "Why not?", "Who?"),
    ]
    files = {f"data__{split}_prefs-00000-of-00001_DOT_parquet": rows for split in ("train", "test")}
    written = prepared("ultrafeedback", originals(**files))["train"]
    assert [(row["prompt"][0]["content"], row["chosen"], row["rejected"]) for row in written] == [
        ("Why?", "So.", "No."),
        ("Who?", "Because.", "Why not?"),
    ]
    told = capsys.readouterr().out
    for reason in ("both answers are the same", "no higher score", "no answer", "not to the same prompt"):
        assert reason in told
    loader = PromptLoader(
        tmp_path / "out" / "train.parquet",
        make_tokenizer(TokenizerSpec(kind="bytes")),
        max_prompt_tokens=30,
        overlong="error",
        responses=ResponseColumns(("chosen", "rejected"), 20, "error"),
        with_answers=False,
    )
    taken = loader.read(range(2)).columns
    assert [taken[f"responses.{turn}"].lengths.tolist() for turn in (0, 1)] == [[4, 9], [4, 9]]


def test_a_chat_that_ends_with_a_question_is_refused(originals, prepared) -> None:
    broken = pair("So.", "No.")
    broken["rejected"] = broken["rejected"][:1]
    folder = originals(train_DOT_jsonl=[broken], test_DOT_jsonl=[broken])
    with pytest.raises(SystemExit, match=r"train\.jsonl:1: 'rejected' does not end with a message of the assistant"):
        prepared("ultrafeedback", folder)
