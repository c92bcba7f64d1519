"""dapo_math.py: the authors' rows as they are, each question once."""

from __future__ import annotations

import pytest


def row(text: str, answer: str, index: str) -> dict:
    return {
        "data_source": "math_dapo",
        "prompt": [{"content": text, "role": "user"}],
        "ability": "MATH",
        "reward_model": {"ground_truth": answer, "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": index},
    }


def test_each_question_is_kept_once(originals, prepared, capsys) -> None:
    train = [row("a", "34", "id-a"), row("b", "5", "id-b")] * 100 + [row("b", "6", "id-c"), row("c", "", "id-d")]
    folder = originals(
        **{"dapo-math-17k_DOT_parquet": train, "aime-2024_DOT_parquet": [row("Answer: x", "7", "0")] * 32}
    )
    rows = prepared("dapo_math", folder)
    assert rows["train"] == [
        {
            "data_source": "math_dapo",
            "prompt": [{"content": text, "role": "user"}],
            "ability": "MATH",
            "reward_model": {"ground_truth": answer, "style": "rule"},
            "extra_info": {"split": "train", "index": index, "id": own},
        }
        for index, (text, answer, own) in enumerate([("a", "34", "id-a"), ("b", "5", "id-b")])
    ]
    assert len(rows["test"]) == 1
    first = capsys.readouterr().out.splitlines()[0]
    assert "dropped 198: asked before; dropped 1: asked before, with another answer; dropped 1: no answer" in first


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt": "a text"}, "'prompt' is text, not a list"),
        ({"prompt": [{"role": "user"}]}, "a message of 'prompt' has no role or no content"),
        ({"reward_model": None}, "'reward_model' is null, not an object"),
    ],
)
def test_another_schema_is_refused(originals, prepared, change: dict, message: str) -> None:
    folder = originals(train_DOT_jsonl=[{**row("a", "1", "i"), **change}])
    with pytest.raises(SystemExit, match=rf"train\.jsonl:1: {message}"):
        prepared("dapo_math", folder)
