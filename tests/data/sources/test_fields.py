"""Prompts and answers in columns of other schemas: text, chats of several forms, system messages, worked answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
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


def test_texts_of_many_brackets_are_texts(table_of) -> None:
    table = table_of({"prompt": "[" * 100_000})
    assert text(table) == "[" * 100_000


WRONG = {
    "a number": ({"prompt": 5}, "a prompt that is neither text nor a list of messages"),
    "a truth": ({"prompt": True}, "a prompt that is neither"),
    "an object": ({"prompt": USER}, "a prompt that is neither"),
    "a list of texts": ({"prompt": ["a", "b"]}, "a prompt that is neither"),
    "a list of numbers": ({"prompt": [1]}, "a prompt that is neither"),
    "a list of lists": ({"prompt": [[USER]]}, "a prompt that is neither"),
    "a message and a text": ({"prompt": [USER, "b"]}, "a prompt that is neither"),
    "a text for a struct": ({"answer": "2"}, "a value of `answer` that is no struct with the field truth"),
    "a list for a struct": ({"answer": ["2"]}, "a value of `answer` that is no struct with the field truth"),
    "a number for a struct": ({"answer": 2}, "a value of `answer` that is no struct with the field truth"),
    "a text for a struct in one": ({"answer": {"truth": "2"}}, "a value of `answer.truth` that is no struct"),
    "a number as data source": ({"data_source": 5}, "a data_source that is no text"),
    "zero as data source": ({"data_source": 0}, "a data_source that is no text"),
    "a list as data source": ({"data_source": ["a"]}, "a data_source that is no text"),
}


@pytest.mark.parametrize("case", WRONG)
@pytest.mark.parametrize("system", [None, "Add."])
def test_values_of_other_types_are_named_with_their_row(table_of, case, system) -> None:
    values, message = WRONG[case]
    good = {"prompt": "1+1=", "answer": {"truth": {"text": "2"}}, "data_source": "sums"}
    keys = {"answer_key": "answer.truth.text" if "in one" in case else "answer.truth", "system_prompt": system}
    table = table_of(*[good] * 300, {**good, **values}, marked=True, **keys)
    with pytest.raises(ValueError, match=r"rows\.jsonl:301 has a .*; mend the row, or remove it") as caught:
        table.texts([0, 300])
    assert message in str(caught.value)


@pytest.mark.parametrize("value", [5, {"a": 1}, ["a"], [ASSISTANT, "a"]])
def test_responses_of_other_types_are_named_with_their_row(tmp_path, value) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": "1+1=", "reply": each}) + "\n" for each in ("2", value)))
    tokenizer = make_tokenizer(TokenizerSpec(kind="bytes"))
    table = PromptTable(path, tokenizer, responses=["reply"], with_answers=False)
    with pytest.raises(ValueError, match=r"rows\.jsonl:2: `reply` holds .*, no response"):
        table.responses(1)
    with pytest.raises(ValueError, match=r"rows\.jsonl:2: a response is neither text nor a list of messages"):
        table.prompt(1)


@pytest.mark.parametrize("ending", ["parquet", "jsonl"])
@pytest.mark.parametrize("lacks", ["prompt", "answer"])
def test_each_file_has_the_columns(tmp_path, ending, lacks) -> None:
    for number in range(5):
        row = {name: "2" for name in ("prompt", "answer") if number != 3 or name != lacks}
        path = tmp_path / f"{number}.{ending}"
        if ending == "parquet":
            pq.write_table(pa.Table.from_pylist([row]), path)
        else:
            path.write_text(json.dumps(row) + "\n")
    source = open_source("sums", SourceSpec(path=tmp_path, answer_key="answer"))
    tokenizer = make_tokenizer(TokenizerSpec(kind="bytes"))
    with pytest.raises(ValueError, match=rf"/3\.{ending} has no column {lacks}; it needs prompt and answer"):
        PromptTable(source, tokenizer)


@pytest.mark.parametrize("name", ["prompt", "answer", "data_source", "extra_info"])
def test_columns_of_a_name_are_told(tmp_path, name) -> None:
    table = pa.table({each: ["2"] for each in ("prompt", "answer", "data_source", "extra_info")})
    pq.write_table(table, tmp_path / "0.parquet")
    pq.write_table(table.append_column(name, table[name]), tmp_path / "1.parquet")
    source = open_source("sums", SourceSpec(path=tmp_path, answer_key="answer"))
    with pytest.raises(ValueError, match=rf"/1\.parquet has 2 columns `{name}`; keep one of them"):
        PromptTable(source, make_tokenizer(TokenizerSpec(kind="bytes")))
