"""Tokenizers made on the spot are exact; folders are read, or refused with a sentence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from dagrl.config.schema import ModelSpec, TokenizerSpec
from dagrl.model_files.tokenizer import load_tokenizer, make_tokenizer

ALPHABET = "0123456789+-= \n<>eospadunk."
BYTES = make_tokenizer(TokenizerSpec(kind="bytes"))
CHARACTERS = make_tokenizer(TokenizerSpec(kind="characters", alphabet=ALPHABET))


@settings(max_examples=200, deadline=None)
@given(st.text(alphabet=st.characters(exclude_categories=["Cs"])))
def test_bytes_are_the_utf8_of_any_text_and_come_back(text: str) -> None:
    tokens = BYTES.encode(text, add_special_tokens=False)
    assert tokens == list(text.encode())
    assert BYTES.decode(tokens, skip_special_tokens=True) == text


@settings(max_examples=200, deadline=None)
@given(st.text(alphabet=ALPHABET))
def test_characters_are_one_token_each_and_come_back(text: str) -> None:
    tokens = CHARACTERS.encode(text, add_special_tokens=False)
    assert tokens == [3 + ALPHABET.index(character) for character in text]
    assert CHARACTERS.decode(tokens, skip_special_tokens=True) == text


@pytest.mark.parametrize("tokenizer", [BYTES, CHARACTERS])
def test_special_tokens_are_distinct_and_vanish_when_decoded(tokenizer: PreTrainedTokenizerBase) -> None:
    pad, eos = tokenizer.pad_token_id, tokenizer.eos_token_id
    assert pad != eos
    tokens = [pad, *tokenizer.encode("1 + 1 .", add_special_tokens=False), eos, pad]
    assert tokenizer.decode(tokens, skip_special_tokens=True) == "1 + 1 ."


@pytest.mark.parametrize("tokenizer", [BYTES, CHARACTERS])
@pytest.mark.parametrize("text", ["<eos>", "<pad>", "1<unk>2"])
def test_text_that_spells_a_special_token_is_only_text(tokenizer: PreTrainedTokenizerBase, text: str) -> None:
    tokens = tokenizer.encode(text, add_special_tokens=False)
    assert len(tokens) == len(text)
    assert tokenizer.decode(tokens, skip_special_tokens=True) == text


def test_vocabulary_sizes() -> None:
    assert len(BYTES) == 258
    assert len(CHARACTERS) == len(ALPHABET) + 3


def test_a_character_outside_the_alphabet_is_unknown() -> None:
    assert CHARACTERS.encode("1x2", add_special_tokens=False)[1] == CHARACTERS.unk_token_id


def test_the_chat_template_joins_the_contents() -> None:
    chat = [{"role": "system", "content": "1+"}, {"role": "user", "content": "2="}]
    assert CHARACTERS.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) == "1+2="


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"kind": "characters"}, "needs an alphabet"),
        ({"kind": "characters", "alphabet": "abca"}, "'a' more than once"),
        ({"kind": "bytes", "alphabet": "ab"}, "has no alphabet"),
    ],
)
def test_descriptions_that_make_no_sense_are_refused(spec: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_tokenizer(ModelSpec(init={}, tokenizer=TokenizerSpec(**spec)))


def test_a_model_without_a_tokenizer_is_refused() -> None:
    with pytest.raises(ValueError, match=r"set model\.path or model\.tokenizer"):
        load_tokenizer(ModelSpec(init={}))


def test_a_saved_tokenizer_is_loaded_from_its_folder(tmp_path: Path) -> None:
    CHARACTERS.save_pretrained(tmp_path)
    for model in (ModelSpec(path=tmp_path), ModelSpec(init={}, tokenizer=tmp_path)):
        loaded = load_tokenizer(model)
        assert loaded.encode("1+1=", add_special_tokens=False) == CHARACTERS.encode("1+1=", add_special_tokens=False)
        assert loaded.decode([4, 1], skip_special_tokens=True) == ALPHABET[1]


def test_mistral_models_with_two_tokenizers_are_read_with_their_chat_template(tmp_path: Path) -> None:
    CHARACTERS.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "mistral", "transformers_version": "4.45.0"}')
    (tmp_path / "tekken.json").write_text("{}")
    loaded = load_tokenizer(ModelSpec(path=tmp_path))
    assert loaded.chat_template == CHARACTERS.chat_template
    assert loaded.encode("1+2", split_special_tokens=True) == CHARACTERS.encode("1+2")


def test_a_folder_tokenizer_without_padding_pads_with_its_end(tmp_path: Path) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast

    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(BPE({"a": 0, "</s>": 1}, [])), eos_token="</s>").save_pretrained(
        tmp_path
    )
    assert load_tokenizer(ModelSpec(path=tmp_path)).pad_token_id == 1


def test_missing_and_empty_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there is no tokenizer folder"):
        load_tokenizer(ModelSpec(path=tmp_path / "nowhere"))
    with pytest.raises(ValueError, match=r"^cannot load a tokenizer from [^\n]*$"):
        load_tokenizer(ModelSpec(path=tmp_path))


def test_a_file_that_the_library_does_not_understand_is_refused(tmp_path: Path) -> None:
    CHARACTERS.save_pretrained(tmp_path)
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "model": {"type": "of a later version"}}))
    with pytest.raises(ValueError, match=r"^cannot load a tokenizer from [^\n]*; it needs tokenizer\.json [^\n]*$"):
        load_tokenizer(ModelSpec(path=tmp_path))


def test_code_of_a_folder_is_refused_without_a_question(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("builtins.input", lambda _: "y")
    mark = tmp_path / "was_here"
    (tmp_path / "code.py").write_text(f"open({str(mark)!r}, 'w')\n")
    described = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["code.Own", None]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(described))
    with pytest.raises(ValueError, match=r"cannot load a tokenizer from .*: it needs Python code .* not run"):
        load_tokenizer(ModelSpec(path=tmp_path))
    assert not mark.exists()
