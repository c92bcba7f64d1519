"""A model's config and its tokenizer's tokens, read as plain JSON."""

from __future__ import annotations

import json

import pytest

from dagrl.config.schema import ModelSpec, TokenizerSpec
from dagrl.model_files.hf_config import read_config, token_ids

ADDED = [{"content": "<end>", "id": 2}]


@pytest.mark.parametrize(
    ("content", "ids"),
    [
        ({"model": {"vocab": {"a": 0, "b": 1}}}, {"a": 0, "b": 1}),
        ({"model": {"vocab": {"a": 0, "b": 1}}, "added_tokens": ADDED}, {"a": 0, "b": 1, "<end>": 2}),
        # Unigram: each with its score.
        ({"model": {"vocab": [["a", -1.5], ["b", -2.0]]}, "added_tokens": ADDED}, {"a": 0, "b": 1, "<end>": 2}),
    ],
)
def test_tokens_are_those_that_a_tokenizer_lists(tmp_path, content, ids) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    assert token_ids(tmp_path) == ids
    model = ModelSpec(init={"model_type": "qwen3"}, tokenizer=tmp_path)
    assert read_config(model) == {"model_type": "qwen3", "vocab_size": len(ids)}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not a JSON object"),
        ("[" * 100_000, "is not a JSON object"),
        ("[]", "is not a JSON object; copy the file again"),
        ("{}", "does not list its tokens; add vocab_size to model.init"),
        ('{"model": "BPE"}', "is no tokenizer of Hugging Face's; copy the file again"),
        ('{"model": {"vocab": [1, 2]}}', "is no tokenizer of Hugging Face's; copy the file again"),
        ('{"model": {"vocab": {"a": 0}}, "added_tokens": [{}]}', "is no tokenizer of Hugging Face's"),
    ],
)
def test_a_file_that_is_no_tokenizer_is_one_sentence(tmp_path, text, message) -> None:
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(ValueError, match=message) as caught:
        token_ids(tmp_path)
    assert str(tmp_path / "tokenizer.json") in str(caught.value)


def test_tokenizers_made_on_the_spot_have_their_special_tokens_beside() -> None:
    assert token_ids(TokenizerSpec(kind="characters", alphabet="01")) == {
        "<pad>": 0,
        "<eos>": 1,
        "<unk>": 2,
        "0": 3,
        "1": 4,
    }
    of_bytes = token_ids(TokenizerSpec(kind="bytes"))
    assert (len(of_bytes), of_bytes["<0x41>"], of_bytes["<eos>"]) == (258, 0x41, 257)
    with pytest.raises(ValueError, match="random weights bring no tokenizer"):
        token_ids(None)
