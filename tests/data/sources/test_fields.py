"""Prompts and answers in columns of other schemas: text, chats of several forms, system messages, worked answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dagrl.config.schema import SourceSpec, TokenizerSpec
from dagrl.data.prompt_table import PromptTable
from dagrl.data.sources import open_source
from dagrl.data.sources.fields import answer_of
from dagrl.model_files.tokenizer import make_tokenizer

USER = {"role": "user", "content": "1+1="}
HUMAN = {"from": "human", "value": "1+1="}
ASSISTANT = {"role": "assistant", "content": "2"}
SYSTEM = {"role": "system", "content": "Add. "}


@pytest.fixture
def table_of(tmp_path: Path):
    """Make a table of rows with a source's keys; with `marked`, a chat template that writes roles."""

    def make(*rows: dict[str, Any], marked: bool = False, **keys: Any) -> PromptTable:
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        tokenizer = make_tokenizer(TokenizerSpec(kind="bytes"))
        if marked:
            tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
        return PromptTable(open_source("sums", SourceSpec(path=path, **keys)), tokenizer, with_answers=False)

    return make


def text(table: PromptTable, row: int = 0) -> str:
    return bytes(table.prompt(row).astype("uint8")).decode()


@pytest.mark.parametrize(
    ("value", "keys", "wanted"),
    [
        # Text in `prompt` is complete; in another column it is a question.
        ("1+1=", {}, "1+1="),
        ("1+1=", {"prompt_key": "q"}, "<user>1+1=<assistant>"),
        ("1+1=", {"system_prompt": "Add. "}, "<system>Add. <user>1+1=<assistant>"),
        ("1+1=", {"system_prompt": ""}, "<system><user>1+1=<assistant>"),
        ([USER], {"prompt_key": "q"}, "<user>1+1=<assistant>"),
        ([SYSTEM, USER], {"system_prompt": "No. "}, "<system>Add. <user>1+1=<assistant>"),
        ([USER, ASSISTANT], {"prompt_key": "messages"}, "<user>1+1=<assistant>"),
        ([USER, ASSISTANT, USER, ASSISTANT], {"prompt_key": "m"}, "<user>1+1=<assistant>2<user>1+1=<assistant>"),
        ([HUMAN, {"from": "gpt", "value": "2"}], {"prompt_key": "conversations"}, "<user>1+1=<assistant>"),
        ([HUMAN], {}, "<user>1+1=<assistant>"),
        ([{"from": "system", "value": "Add. "}, HUMAN], {"prompt_key": "c"}, "<system>Add. <user>1+1=<assistant>"),
        (json.dumps([HUMAN]), {"prompt_key": "c"}, "<user>1+1=<assistant>"),
        ({"q": "1+1="}, {"prompt_key": "data.q"}, "<user>1+1=<assistant>"),
    ],
)
def test_prompts_of_other_schemas(table_of, value, keys, wanted) -> None:
    column = keys.get("prompt_key", "prompt").partition(".")[0]
    table = table_of({column: value}, marked=True, **keys)
    assert text(table) == wanted


def test_messages_have_the_system_message(table_of) -> None:
    table = table_of({"q": "1+1="}, prompt_key="q", system_prompt="Add. ")
    assert json.loads(table.texts([0])["messages"].strings()[0]) == [SYSTEM, USER]


def test_questions_are_text_where_there_is_no_chat_template(table_of) -> None:
    table = table_of({"q": "1+1="}, prompt_key="q")
    table._tokenizer.chat_template = None
    assert text(table) == "1+1="


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        ("2", "2"),
        (2, "2"),
        (2.5, "2.5"),
        (None, ""),
        (["2", "two"], '["2", "two"]'),
        ([USER, ASSISTANT], "2"),
        ([HUMAN, {"from": "gpt", "value": "2"}], "2"),
        ([{"inputs": "1"}], '[{"inputs": "1"}]'),
        ("1+1 is 2.\n#### 2", "1+1 is 2.\n#### 2"),
    ],
)
def test_answers_of_other_schemas(table_of, value, wanted) -> None:
    table = table_of({"prompt": "a", "answer": value}, answer_key="answer")
    assert table.texts([0])["answer"].strings() == [wanted]


def test_the_sources_name_stands_in_for_a_data_source(table_of) -> None:
    table = table_of({"prompt": "a", "data_source": "mine"}, {"prompt": "b"})
    assert table.texts([1, 0])["data_source"].strings() == ["sums", "mine"]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"q": ""}, r"rows\.jsonl:2: the prompt is empty"),
        ({"q": None}, r"rows\.jsonl:2: the prompt is empty"),
        ({}, r"rows\.jsonl:2: the prompt is empty"),
        ({"q": [ASSISTANT]}, r"rows\.jsonl:2: the prompt is empty"),
        ({"q": [{"role": "user"}]}, r"rows\.jsonl:2: a message of the chat has no content"),
    ],
)
def test_prompts_that_are_none_are_named_when_they_are_used(table_of, row, message) -> None:
    table = table_of({"q": "1+1="}, row, prompt_key="q", system_prompt="Add. ")
    table.hold([0, 1])
    assert text(table, 0) == "Add. 1+1="
    with pytest.raises(ValueError, match=message):
        table.prompt(1)


def test_rows_that_are_held_have_the_tokens_of_rows_alone(table_of) -> None:
    rows = [{"prompt": each} for each in ("a", [USER], "ü", [SYSTEM, USER], "[1] b")]
    one, several = (table_of(*rows, marked=True) for _ in range(2))
    several.hold([4, 2, 0, 1, 3])
    for row in range(5):
        one.hold([row])
        assert several.prompt(row).tolist() == one.prompt(row).tolist()
        assert several.prompt(row).dtype == one.prompt(row).dtype == "int64"


@pytest.mark.parametrize("sender", [["a"], {"a": 1}, 5, None, True])
def test_messages_of_no_sender_are_no_chat(sender) -> None:
    stored = [{"from": sender, "value": "x"}]
    assert json.loads(answer_of(stored)) == stored
