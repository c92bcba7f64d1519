"""geo3k.py: figures come through byte by byte."""

from __future__ import annotations

import pytest

from dagrl.config.schema import TokenizerSpec
from dagrl.data.prompts import PromptLoader
from dagrl.model_files.tokenizer import make_tokenizer

FIGURES = [{"bytes": bytes(range(256)) * 50, "path": "a.png"}, {"bytes": b"\x00", "path": None}]


def test_images_are_kept_unchanged(originals, prepared, tmp_path, capsys) -> None:
    rows = [
        {"problem": "<image>Find x.", "answer": "3", "images": FIGURES[:1]},
        {"problem": "<image><image>Compare.", "answer": "2 \\sqrt { 221 }", "images": FIGURES},
        {"problem": "<image>Find y.", "answer": "3", "images": FIGURES},
        {"problem": "<image>Find z.", "answer": " ", "images": FIGURES[:1]},
    ]
    folder = originals(**{f"data__{split}-00000-of-00001_DOT_parquet": rows * 100 for split in ("train", "test")})
    written = prepared("geo3k", folder)["train"]
    assert len(written) == 200
    assert [row["images"] for row in written[-2:]] == [FIGURES[:1], FIGURES]
    assert written[1]["prompt"][0]["content"].startswith("<image><image>Compare. Think about")
    assert "dropped 100: other figures than <image> marks; dropped 100: no answer" in capsys.readouterr().out
    loader = PromptLoader(
        tmp_path / "out" / "train.parquet",
        make_tokenizer(TokenizerSpec(kind="bytes")),
        max_prompt_tokens=300,
        overlong="error",
    )
    assert loader.read(range(2)).columns["answer"].strings() == ["3", "2 \\sqrt { 221 }"]


def test_figures_of_another_form_are_refused(originals, prepared) -> None:
    folder = originals(train_DOT_jsonl=[{"problem": "<image>?", "answer": "1", "images": ["a.png"]}])
    with pytest.raises(SystemExit, match=r"train\.jsonl:1: one of 'images' is not \{bytes, path\}"):
        prepared("geo3k", folder)
