"""Tokens at which generation ends."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dagrl.config.schema import ModelSpec, TokenizerSpec
from dagrl.model_files.end_tokens import end_tokens
from dagrl.model_files.tokenizer import make_tokenizer

TOKENIZER = make_tokenizer(TokenizerSpec(kind="bytes"))
OWN = TOKENIZER.eos_token_id


@pytest.mark.parametrize(
    ("config", "generation", "ends"),
    [
        (None, None, {OWN}),
        ({"eos_token_id": 7}, None, {OWN, 7}),
        ({"eos_token_id": 7}, {"eos_token_id": [8, 9]}, {OWN, 7, 8, 9}),
        ({"eos_token_id": None}, {}, {OWN}),
        ([7], {"eos_token_id": 8}, {OWN, 8}),
    ],
)
def test_all_that_servers_heed_are_found(tmp_path: Path, config: Any, generation: Any, ends: set[int]) -> None:
    for name, told in (("config.json", config), ("generation_config.json", generation)):
        if told is not None:
            (tmp_path / name).write_text(json.dumps(told))
    assert end_tokens(ModelSpec(path=tmp_path), TOKENIZER) == ends


def test_a_model_of_random_weights_has_its_tokenizers() -> None:
    assert end_tokens(ModelSpec(init={"model_type": "qwen3"}), TOKENIZER) == {OWN}
    assert end_tokens(ModelSpec(init={"model_type": "qwen3", "eos_token_id": [7, 8]}), TOKENIZER) == {OWN, 7, 8}
