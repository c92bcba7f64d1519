"""Responses in prompt files: their columns, their tokens, and errors."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from chatml import chatml_tokenizer

from dagrl.config.schema import TokenizerSpec
from dagrl.data.batch import Column
from dagrl.data.demonstrations import ResponseColumns, in_turn
from dagrl.data.prompts import PromptLoader, PromptSlice
from dagrl.model_files.tokenizer import make_tokenizer

TOKENIZER = make_tokenizer(TokenizerSpec(kind="bytes"))
END = TOKENIZER.eos_token_id


def chat(*contents: str) -> list[dict[str, str]]:
    """Messages of a user and an assistant in turn."""
    return [{"role": ("user", "assistant")[turn % 2], "content": text} for turn, text in enumerate(contents)]


@pytest.fixture
def loader(tmp_path: Path) -> Callable[..., PromptLoader]:
    """``loader(rows, columns, **options)``: a loader of prompts with the responses of those columns."""

    def make(rows: list[dict[str, Any]], columns: tuple[str, ...], **options: Any) -> PromptLoader:
        path = tmp_path / "rows.parquet"
        pq.write_table(pa.Table.from_pylist(rows), path)
        responses = ResponseColumns(columns, options.pop("longest", 100), options.pop("overlong_responses", "drop"))
        tokenizer = options.pop("tokenizer", TOKENIZER)
        defaults = {"max_prompt_tokens": 100, "overlong": "drop", "with_answers": False}
        return PromptLoader(path, tokenizer, responses=responses, **{**defaults, **options})

    return make


def texts(piece: PromptSlice, name: str = "responses.0") -> list[str]:
    """Texts of responses; ``$`` is the end token."""
    column = piece.columns[name]
    return [
        "".join("$" if token == END else chr(token) for token in column[row].tolist()) for row in range(len(column))
    ]


@pytest.mark.parametrize(
    ("row", "column"),
    [
        ({"prompt": "2+2=", "response": "4"}, "response"),
        ({"prompt": "2+2=", "extra_info": {"index": 1, "answer": "4"}}, "extra_info.answer"),
        ({"prompt": "2+2=", "reward_model": {"ground_truth": "4", "style": "rule"}}, "reward_model.ground_truth"),
        ({"prompt": chat("2+2="), "chosen": chat("2+2=", "4")}, "chosen"),
        ({"prompt": chat("2+2="), "outer": {"inner": {"said": "4"}}}, "outer.inner.said"),
    ],
)
def test_a_response_is_found_and_ends_with_the_end_token(loader, row, column):
    piece = loader([row], (column,)).read(range(1))
    assert texts(piece) == ["4$"]
    assert texts(piece, "prompt_tokens") == ["2+2="]


def test_a_token_that_begins_every_text_is_neither_put_before_a_response_nor_a_second_time_before_a_chat(loader):
    from tokenizers.processors import TemplateProcessing

    tokenizer = make_tokenizer(TokenizerSpec(kind="bytes"))
    begins = TemplateProcessing(single="<eos> $A", special_tokens=[("<eos>", END)])
    tokenizer.backend_tokenizer.post_processor = begins
    rows = [{"chosen": chat("1+1=", "2")}]
    piece = loader(rows, ("chosen",), tokenizer=tokenizer).read(range(1))
    assert (texts(piece, "prompt_tokens"), texts(piece)) == (["1+1="], ["2$"])
    piece = loader([{"prompt": "1+1=", "response": "2"}], ("response",), tokenizer=tokenizer).read(range(1))
    assert (texts(piece, "prompt_tokens"), texts(piece)) == (["$1+1="], ["2$"])


def test_without_prompts_the_chat_before_the_response_is_the_prompt(loader):
    rows = [{"messages": chat("1+1=", "2", "and 2+2=", "4")}, {"messages": chat("5=", "5")}]
    piece = loader(rows, ("messages",)).read(range(2))
    assert texts(piece, "prompt_tokens") == ["1+1=2and 2+2=", "5="]
    assert texts(piece) == ["4$", "5$"]


def test_lists_may_be_large_as_polars_writes_them(tmp_path):
    message = pa.struct({"role": pa.large_string(), "content": pa.large_string()})
    path = tmp_path / "large.parquet"
    pq.write_table(pa.table({"messages": pa.array([chat("1+1=", "2")], pa.large_list(message))}), path)
    options = {"max_prompt_tokens": 100, "overlong": "drop", "with_answers": False}
    piece = PromptLoader(path, TOKENIZER, responses=ResponseColumns(("messages",), 9, "drop"), **options).read(range(1))
    assert (texts(piece, "prompt_tokens"), texts(piece)) == (["1+1="], ["2$"])


def test_a_whole_chat_comes_before_a_bare_prompt(loader):
    rows = [{"prompt": "1+1=", "chosen": chat("Add. ", "Well: ", "1+1=", "2")}]
    assert texts(loader(rows, ("chosen",)).read(range(1)), "prompt_tokens") == ["Add. Well: 1+1="]
    alone = [{"prompt": "1+1=", "chosen": chat("", "2")[1:]}]
    assert texts(loader(alone, ("chosen",)).read(range(1)), "prompt_tokens") == ["1+1="]


def test_pairs_of_chats_share_their_prompt(loader):
    rows = [{"chosen": chat("1+1=", "2"), "rejected": chat("1+1=", "3")}]
    piece = loader(rows, ("chosen", "rejected")).read(range(1))
    assert (texts(piece), texts(piece, "responses.1")) == (["2$"], ["3$"])
    rows.append({"chosen": chat("1+1=", "2"), "rejected": chat("1+2=", "3")})
    with pytest.raises(ValueError, match=r"row 1 .*: the chats differ before their last message"):
        loader(rows, ("chosen", "rejected")).read(range(2))


def test_answers_are_optional_beside_responses_and_empty_where_there_are_none(loader):
    piece = loader([{"prompt": "a", "response": "b"}], ("response",)).read(range(1))
    assert [piece.columns[name].strings() for name in ("answer", "data_source", "extra_info")] == [
        [""],
        ["train"],
        ["{}"],
    ]
    with pytest.raises(ValueError, match="has no column reward_model"):
        loader([{"prompt": "a", "response": "b"}], ("response",), with_answers=True)


def test_a_prompt_with_a_response_that_is_too_long_is_dropped_with_all_its_responses(loader):
    rows = [{"prompt": str(index), "a": "x" * index, "b": "y" * (9 - index)} for index in range(10)]
    piece = loader(rows, ("a", "b"), longest=8).read(range(10))
    # With the end token seven characters fit: rows 2 to 7.
    assert texts(piece, "prompt_tokens") == [str(index) for index in range(2, 8)]
    assert (piece.dropped, piece.cut) == ((0, 1, 8, 9), ())


def test_a_response_may_be_cut_at_its_end_and_is_unended_then(loader):
    piece = loader([{"prompt": "p", "a": "abcdef"}], ("a",), longest=4, overlong_responses="cut").read(range(1))
    assert (texts(piece), piece.cut) == (["abcd"], (0,))


def test_a_response_that_is_too_long_may_be_an_error(loader):
    with pytest.raises(ValueError, match=r"row 0 .*the response has 7 tokens, more than max_response_tokens=4; raise"):
        loader([{"prompt": "p", "a": "abcdef"}], ("a",), longest=4, overlong_responses="error").read(range(1))


def test_a_file_in_which_nothing_fits_is_an_error(loader):
    rows = [{"prompt": "p", "a": "abcdef"}] * 3
    told = "none of its 3 prompts fits max_prompt_tokens=100 and max_response_tokens=4; .* up to 7 to 7; raise them"
    with pytest.raises(ValueError, match=told):
        loader(rows, ("a",), longest=4).read(range(3))
    with pytest.raises(ValueError, match="none of its 3 prompts fits"):
        loader(rows, ("a",), longest=4).one_epoch()


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (None, "`a` holds no response"),
        ([], "`a` holds no response"),
        (chat("only", "then", "asked"), "`a` ends with a message of the user;"),
        (
            [*chat("q"), {"role": "assistant", "content": None}],
            "`a` ends with a message of the assistant that has no text",
        ),
        ([*chat("q"), None], "`a` ends with a message without a role;"),
    ],
)
def test_a_row_without_a_response_is_named(loader, value, told):
    rows = [{"prompt": "p", "a": chat("q", "r")}, {"prompt": "p", "a": value}]
    with pytest.raises(ValueError, match=rf"row 1 \(the first is 0\): {told}"):
        loader(rows, ("a",)).read(range(2))


def test_a_character_without_a_token_is_named(loader):
    tokenizer = make_tokenizer(TokenizerSpec(kind="characters", alphabet="0123456789+="))
    rows = [{"prompt": "2+2=", "a": "4!"}]
    with pytest.raises(ValueError, match="`a`: the tokenizer does not know the character '!' of the response '4!'"):
        loader(rows, ("a",), tokenizer=tokenizer).read(range(1))


def test_a_missing_column_is_named(loader):
    with pytest.raises(ValueError, match=r"has no column extra_info\.answer; it needs prompt and extra_info\.answer"):
        loader([{"prompt": "a", "extra_info": {"index": 1}}], ("extra_info.answer",))


def test_rows_of_a_group_take_the_responses_in_turn():
    columns = [Column.ragged([[1], [2, 2], [3]], "int64"), Column.ragged([[10], [20], [30, 30]], "int64")]
    taken = in_turn(columns, np.array([0, 0, 0, 1, 1, 1, 2, 2, 2]))
    assert [taken[row].tolist() for row in range(9)] == [[1], [10], [1], [2, 2], [20], [2, 2], [3], [30, 30], [3]]
    single = in_turn(columns[:1], np.array([0, 1, 2]))
    assert [single[row].tolist() for row in range(3)] == [[1], [2, 2], [3]]
    third = Column.ragged([[7], [8], [9]], "int64")
    pairs = in_turn([*columns, third], np.array([0, 0, 1, 1, 2, 2]))
    assert [pairs[row].tolist() for row in range(6)] == [[1], [10], [2, 2], [20], [3], [30, 30]]


CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
"""A call in OpenAI's form, with its arguments as an object."""


def tokenizer_of(template: str) -> Any:
    """Bytes and the special tokens of ChatML, with a template."""
    tokenizer = chatml_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


QWEN = """\
{%- for m in messages %}<|im_start|>{{ m.role }}
{% if m.reasoning_content %}<think>
{{ m.reasoning_content }}
</think>

{% endif %}{{ m.content }}{% for call in m.tool_calls or [] %}
<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
DEEPSEEK = """\
{%- for m in messages %}<{{ m.role }}>{{ m.content }}{% for call in m.tool_calls or [] %}\
{{ '[' + call.function.name + ' ' + call.function.arguments + ']' }}{% endfor %}{% endfor %}\
{% if add_generation_prompt %}<assistant>{% endif %}"""
"""Joins the arguments of calls, as text, to other text; writes no end of a turn."""
NO_CONTENT = """\
{%- for m in messages %}<{{ m.role }}>{% if m.tool_calls %}{{ m.tool_calls[0].function | tojson }}\
{% else %}{{ m.content }}{% endif %}<|im_end|>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"""
"""Llama 3.1's manner: calls in place of the content, and only one."""
OPENS_THINKING = QWEN.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
"""Its prompts end with what only a message with reasoning begins with."""


def reply(content: str | None, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **fields}


@pytest.mark.parametrize(
    ("template", "message", "written"),
    [
        (QWEN, reply("2", reasoning_content="1 and 1"), "<think>\n1 and 1\n</think>\n\n2$"),
        (OPENS_THINKING, reply("2", reasoning_content="1 and 1"), "1 and 1\n</think>\n\n2$"),
        (QWEN, reply(None, tool_calls=[CALL]), '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>$'),
        (QWEN, reply("So", tool_calls=[CALL]), 'So<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>$'),
        (
            QWEN,
            reply("", tool_calls=[{"function": {"name": "add", "arguments": '{"a": null}'}}]),
            '<tool_call>{"name": "add", "arguments": {"a": null}}</tool_call>$',
        ),
        (
            QWEN,
            reply("", tool_calls='[{"name": "add", "arguments": {"a": 1}}]'),
            '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>$',
        ),
        (QWEN, reply(None, reasoning_content="Hm"), "<think>\nHm\n</think>\n\n$"),
        (DEEPSEEK, reply(None, tool_calls=[CALL]), '[add {"a": 1}]$'),
        (DEEPSEEK, reply("2 "), "2 $"),
        (QWEN, reply("2", tool_calls=[], reasoning_content=""), "2$"),
        (NO_CONTENT, reply(None, tool_calls=[CALL]), '{"name": "add", "arguments": {"a": 1}}$'),
    ],
)
def test_reasoning_and_calls_are_written_by_the_chat_template(loader, template, message, written):
    rows = [{"messages": [*chat("1+1="), message]}]
    piece = loader(rows, ("messages",), tokenizer=tokenizer_of(template), longest=200).read(range(1))
    assert decoded(piece, template) == written


def decoded(piece: PromptSlice, template: str, name: str = "responses.0") -> str:
    """Text of a response; ``$`` is the end of its turn."""
    return tokenizer_of(template).decode(piece.columns[name][0]).replace("<|im_end|>", "$")


@pytest.mark.parametrize(
    ("template", "message", "told"),
    [
        (QWEN, reply("2", thinking="Hm"), "does not write the message's `thinking` beside `content`; use"),
        (
            QWEN,
            reply("2", function_call={"name": "f", "arguments": "{}"}),
            "does not write the message's `function_call`",
        ),
        (DEEPSEEK, reply("2", reasoning_content="Hm"), "the message's `reasoning_content`"),
        (NO_CONTENT, reply("So", tool_calls=[CALL]), "the message's `content` beside `tool_calls`"),
        (NO_CONTENT, reply("", tool_calls=[CALL, CALL]), "does not write the message's `tool_calls`"),
        (OPENS_THINKING, reply("", tool_calls=[CALL]), "and does not write the response behind that"),
        (QWEN, reply("", tool_calls="add(1)"), "the message's `tool_calls` has no function with a name: 'add"),
        (QWEN, reply("", tool_calls=[{"id": "1"}]), "the message's `tool_calls` has no function with a name"),
        (QWEN.replace("{{ m.content }}", "{{ m.x.y }}"), reply("2", reasoning_content="Hm"), "rejects a chat of user"),
        (None, reply("2", reasoning_content="Hm"), "no chat template"),
    ],
)
def test_reasoning_and_calls_that_a_template_does_not_write_are_refused(loader, template, message, told):
    rows = [{"prompt": "1+1=", "a": [message]}]
    with pytest.raises(ValueError, match=rf"row 0 \(the first is 0\).*`a`.*{told}"):
        loader(rows, ("a",), tokenizer=tokenizer_of(template)).read(range(1))


def test_pairs_may_differ_in_their_calls(loader):
    other = {"type": "function", "function": {"name": "sub", "arguments": {"b": 2}}}
    rows = [
        {
            "chosen": [*chat("1+1="), reply(None, tool_calls=[CALL])],
            "rejected": [*chat("1+1="), reply("", tool_calls=[other])],
        }
    ]
    piece = loader(rows, ("chosen", "rejected"), tokenizer=tokenizer_of(DEEPSEEK)).read(range(1))
    assert [decoded(piece, DEEPSEEK, f"responses.{place}") for place in (0, 1)] == [
        '[add {"a": 1}]$',
        '[sub {"b": 2}]$',
    ]


def test_calls_before_the_response_are_in_the_prompt(loader):
    asked = [*chat("1+1="), reply(None, tool_calls=[CALL]), {"role": "tool", "content": "2"}]
    piece = loader([{"messages": [*asked, reply("Two")]}], ("messages",), tokenizer=tokenizer_of(DEEPSEEK)).read(
        range(1)
    )
    assert decoded(piece, DEEPSEEK, "prompt_tokens") == '<user>1+1=<assistant>[add {"a": 1}]<tool>2<assistant>'
    assert decoded(piece, DEEPSEEK) == "Two$"


@pytest.mark.parametrize("columns", [("messages",), ("chosen", "rejected")])
@pytest.mark.parametrize("kind", ["maps", "json"])
def test_chats_may_be_maps_or_text_in_json(tmp_path, columns, kind):
    pairs = [[("role", "user"), ("content", "1+1=")], [("content", "2"), ("role", "assistant"), ("name", None)]]
    stored = pairs if kind == "maps" else json.dumps([dict(each) for each in pairs])
    arrow = pa.list_(pa.map_(pa.string(), pa.string())) if kind == "maps" else pa.string()
    path = tmp_path / "chats.parquet"
    pq.write_table(pa.table({"prompt": ["1+1="], **{name: pa.array([stored], arrow) for name in columns}}), path)
    options = {"max_prompt_tokens": 100, "overlong": "drop", "with_answers": False}
    piece = PromptLoader(path, TOKENIZER, responses=ResponseColumns(columns, 9, "drop"), **options).read(range(1))
    assert texts(piece, "prompt_tokens") == ["1+1="]
    assert [texts(piece, f"responses.{place}") for place in range(len(columns))] == [["2$"]] * len(columns)
