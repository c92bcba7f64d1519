"""The prompt loader: which prompts come, in which order, in which shape, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dagrl.config.schema import TokenizerSpec
from dagrl.data.prompts import PromptLoader, PromptSlice
from dagrl.model_files.tokenizer import make_tokenizer

TOKENIZER = make_tokenizer(TokenizerSpec(kind="bytes"))


def row(prompt: Any, answer: Any = "7", **more: Any) -> dict[str, Any]:
    return {"prompt": prompt, "data_source": "demo", "reward_model": {"style": "rule", "ground_truth": answer}, **more}


@pytest.fixture
def loader(tmp_path: Path) -> Callable[..., PromptLoader]:
    """Make a loader over rows, or over the texts of prompts."""

    def make(rows: list[Any], **options: Any) -> PromptLoader:
        path = tmp_path / "prompts.parquet"
        records = [each if isinstance(each, dict) else row(each) for each in rows]
        pq.write_table(pa.Table.from_pylist(records), path, row_group_size=3)
        tokenizer = options.pop("tokenizer", TOKENIZER)
        defaults = {"max_prompt_tokens": 100, "overlong": "drop"}
        return PromptLoader(path, tokenizer, **{**defaults, **options})

    return make


def texts(piece: PromptSlice) -> list[str]:
    tokens = piece.columns["prompt_tokens"]
    return [bytes(tokens[index].astype("uint8")).decode() for index in range(len(tokens))]


NAMES = [f"p{index}" for index in range(10)]


def test_prompts_come_in_the_order_of_the_rows(loader: Callable[..., PromptLoader]) -> None:
    piece = loader(NAMES).read([8, 9, 0, 8])
    assert texts(piece) == ["p8", "p9", "p0", "p8"]
    assert (piece.rows.tolist(), piece.dropped, piece.cut) == ([8, 9, 0, 8], (), ())


def test_too_long_prompts_are_dropped_and_named(loader: Callable[..., PromptLoader]) -> None:
    piece = loader(["aa", "b" * 7, "cc", "d" * 8, "ee"], max_prompt_tokens=6).read(range(5))
    assert texts(piece) == ["aa", "cc", "ee"]
    assert (piece.rows.tolist(), piece.dropped, piece.cut) == ([0, 2, 4], (1, 3), ())


def test_too_long_prompts_are_cut_at_their_beginning(loader: Callable[..., PromptLoader]) -> None:
    piece = loader(["aa", "0123456789", "123456"], max_prompt_tokens=6, overlong="cut").read(range(3))
    assert texts(piece) == ["aa", "456789", "123456"]
    assert (piece.dropped, piece.cut) == ((), (1,))


def test_too_long_prompts_are_an_error_where_wished(loader: Callable[..., PromptLoader]) -> None:
    strict = loader(["aa", "b" * 7], max_prompt_tokens=6, overlong="error")
    assert texts(strict.read([0])) == ["aa"]
    with pytest.raises(ValueError, match=r"prompts\.parquet, row 1 .*7 tokens, more than max_prompt_tokens=6"):
        strict.read([0, 1])


def test_a_source_without_a_usable_prompt_is_an_error(loader: Callable[..., PromptLoader]) -> None:
    hopeless = loader(["aaa", "bbbb", "ccccc"], max_prompt_tokens=2)
    assert hopeless.read([1]).dropped == (1,)
    assert hopeless.read([1, 2]).dropped == (1, 2)
    with pytest.raises(ValueError, match="none of its 3 prompts fits max_prompt_tokens=2; they have 3 to 5 tokens"):
        hopeless.read([0])


def test_one_epoch_has_every_usable_prompt_once(loader: Callable[..., PromptLoader]) -> None:
    piece = loader(["ab", "much too long", "cd"], max_prompt_tokens=4).one_epoch()
    assert texts(piece) == ["ab", "cd"]
    assert (piece.rows.tolist(), piece.dropped) == ([0, 2], (1,))


def test_one_epoch_without_a_usable_prompt_is_an_error(loader: Callable[..., PromptLoader]) -> None:
    with pytest.raises(ValueError, match="its only prompt does not fit max_prompt_tokens=4"):
        loader(["much too long"], max_prompt_tokens=4).one_epoch()


def test_rows_are_drawn_from_all_of_the_file_the_same_ones_each_time(loader: Callable[..., PromptLoader]) -> None:
    names = [chr(ord("a") + row) for row in range(26)]
    drawn = texts(loader(names, draw=6).one_epoch())
    assert len(drawn) == len(set(drawn)) == 6
    assert drawn == sorted(drawn) != names[:6]
    assert max(drawn) > "m", "rows of the second half"
    assert set(texts(loader(names, draw=9).one_epoch())) > set(drawn)
    assert texts(loader(names, draw=99).one_epoch()) == names
    with pytest.raises(ValueError, match=f"row {names.index(drawn[0])} "):
        rows = ["long" * 9 if name == drawn[0] else name for name in names]
        loader(rows, draw=6, max_prompt_tokens=6, overlong="error").one_epoch()


def test_taking_nothing_gives_empty_columns(loader: Callable[..., PromptLoader]) -> None:
    piece = loader(NAMES).read([])
    assert piece.rows.tolist() == []
    assert {name: len(column) for name, column in piece.columns.items()} == {
        "prompt_tokens": 0,
        "messages": 0,
        "answer": 0,
        "data_source": 0,
        "extra_info": 0,
    }


def test_chats_go_through_the_chat_template(loader: Callable[..., PromptLoader]) -> None:
    template = (
        "{% for message in messages %}[{{ message['role'] }}]{{ message['content'] }}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    tokenizer = make_tokenizer(TokenizerSpec(kind="bytes"))
    tokenizer.chat_template = template
    chat = [{"role": "system", "content": "add"}, {"role": "user", "content": "1+1"}]
    piece = loader([row(chat)], tokenizer=tokenizer).read(range(1))
    assert texts(piece) == ["[system]add[user]1+1[assistant]"]
    assert json.loads(piece.columns["messages"].strings()[0]) == chat
    (plain,) = loader(["1+1"]).read(range(1)).columns["messages"].strings()
    assert json.loads(plain) == chat[1:]


def test_fields_that_only_other_messages_have_are_not_there(loader: Callable[..., PromptLoader]) -> None:
    tokenizer = make_tokenizer(TokenizerSpec(kind="bytes"))
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.content }}{% if 'tool_calls' in m %}{% for call in m.tool_calls %}"
        "<{{ call.function.arguments | tojson }}>{% endfor %}{% endif %}{% endfor %}"
    )
    question = {"role": "user", "content": "1+1"}
    calls = [
        {"function": {"name": name, "arguments": arguments}} for name, arguments in [("f", {"a": 1}), ("g", {"b": 2})]
    ]
    asked = [question, {"role": "assistant", "content": "", "tool_calls": calls}]
    piece = loader([row([question]), row(asked)], tokenizer=tokenizer).read(range(2))
    assert texts(piece) == ["1+1", '1+1<{"a": 1}><{"b": 2}>']
    assert [json.loads(each) for each in piece.columns["messages"].strings()] == [[question], asked]


@pytest.mark.parametrize(
    ("kind", "convert"),
    [
        (pa.string(), json.dumps),
        (pa.string(), lambda chat: json.dumps(chat, indent=1) + "\n"),
        (pa.large_list(pa.map_(pa.string(), pa.string())), lambda chat: [list(message.items()) for message in chat]),
    ],
)
def test_chats_may_be_text_in_json_or_maps(tmp_path: Path, kind: pa.DataType, convert: Callable[[Any], Any]) -> None:
    chat = [{"role": "system", "content": "Add: "}, {"role": "user", "content": "1+1"}]
    path = tmp_path / "prompts.parquet"
    extra = pa.array([[("level", "1")]], pa.map_(pa.string(), pa.string()))
    rest = {"data_source": ["demo"], "reward_model": [{"ground_truth": "2"}], "extra_info": extra}
    pq.write_table(pa.table({"prompt": pa.array([convert(chat)], kind), **rest}), path)
    piece = PromptLoader(path, TOKENIZER, max_prompt_tokens=100, overlong="drop").read(range(1))
    assert texts(piece) == ["Add: 1+1"]
    assert json.loads(piece.columns["messages"].strings()[0]) == chat
    assert json.loads(piece.columns["extra_info"].strings()[0]) == {"level": "1"}


@pytest.mark.parametrize("text", ["[1, 2] sorted:", '[{"a": 1}]', "[]", '{"role": "user", "content": "x"}', '["role"]'])
def test_other_texts_in_brackets_are_plain_prompts(loader: Callable[..., PromptLoader], text: str) -> None:
    assert texts(loader([text]).read(range(1))) == [text]


def test_a_message_of_calls_needs_no_content(loader: Callable[..., PromptLoader]) -> None:
    tokenizer = make_tokenizer(TokenizerSpec(kind="bytes"))
    tokenizer.chat_template = (
        "{% for m in messages %}<{{ m.content }}{% for call in m.tool_calls or [] %}"
        "{{ call.function.arguments.a }}{% endfor %}>{% endfor %}"
    )
    call = {"function": {"name": "f", "arguments": '{"a": 1}'}}
    chat = [{"role": "user", "content": "x"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    assert texts(loader([row(chat)], tokenizer=tokenizer).read(range(1))) == ["<x><1>"]


@pytest.mark.parametrize(
    ("single", "around"),
    [("$A <eos>", ("", "$")), ("<eos> $A <eos>", ("$", "$")), ("<eos> $A", ("$", "")), ("$A <eos> <eos>", ("", "$$"))],
)
@pytest.mark.parametrize("text", ["1+1=", "1<eos>"])
def test_a_plain_prompt_has_no_token_behind_it(
    loader: Callable[..., PromptLoader], single: str, around: tuple[str, str], text: str
) -> None:
    from tokenizers.processors import TemplateProcessing

    tokenizer = make_tokenizer(TokenizerSpec(kind="bytes"), finds_images=True)
    end = tokenizer.eos_token_id
    adds = TemplateProcessing(single=single, special_tokens=[("<eos>", end)])
    tokenizer.backend_tokenizer.post_processor = adds

    def shown(tokens: list[int]) -> str:
        return "".join("$" if token == end else chr(token) for token in tokens)

    own = text.replace("<eos>", "$")
    assert shown(tokenizer.encode(text)) == f"{around[0]}{own}{around[1]}"
    (tokens,) = loader([text], tokenizer=tokenizer).read(range(1)).columns["prompt_tokens"]
    assert shown(tokens.tolist()) == f"{around[0]}{own}"


def test_the_chat_template_gets_the_tools_of_the_row(loader: Callable[..., PromptLoader]) -> None:
    tokenizer = make_tokenizer(TokenizerSpec(kind="bytes"))
    tokenizer.chat_template = (
        "{% for tool in tools or [] %}<{{ tool.function.name }}>{% endfor %}{{ messages[0].content }}"
    )
    tools = {name: {"type": "function", "function": {"name": name}} for name in ("calculator", "python")}
    chat = [{"role": "user", "content": "1+1"}]
    rows = [
        row(chat, extra_info={"tools": None}),
        row(chat, extra_info={"tools": ["python", "search"]}),
        row(chat, extra_info={"tools": []}),
    ]
    told = texts(loader(rows, tokenizer=tokenizer, tools=tools).read(range(3)))
    assert told == ["<calculator><python>1+1", "<python>1+1", "1+1"]
    for extra in ({}, {"extra_info": "of any kind"}):
        assert texts(loader([row(chat, **extra)], tokenizer=tokenizer, tools=tools).read(range(1))) == [told[0]]
    assert texts(loader([row(chat)], tokenizer=tokenizer).read(range(1))) == ["1+1"]


def test_a_chat_without_a_chat_template_is_refused(loader: Callable[..., PromptLoader]) -> None:
    tokenizer = make_tokenizer(TokenizerSpec(kind="bytes"))
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match=r"row 0 .*no chat template; use the tokenizer of an instruction-tuned"):
        loader([row([{"role": "user", "content": "hi"}])], tokenizer=tokenizer).read(range(1))
    assert texts(loader(["hi"], tokenizer=tokenizer).read(range(1))) == ["hi"]


def test_a_chat_that_the_template_does_not_take_is_named(loader: Callable[..., PromptLoader]) -> None:
    tokenizer = make_tokenizer(TokenizerSpec(kind="bytes"))
    tokenizer.chat_template = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}fine"
    )
    user, system = ({"role": role, "content": "hi"} for role in ("user", "system"))
    told = r"row 1 .*chat template rejects a chat of system, user: System role not supported; change"
    with pytest.raises(ValueError, match=told):
        loader([row([user]), row([system, user])], tokenizer=tokenizer).read(range(2))


def test_a_template_that_fails_on_a_chat_is_named(loader: Callable[..., PromptLoader]) -> None:
    tokenizer = make_tokenizer(TokenizerSpec(kind="bytes"))
    tokenizer.chat_template = "{{ 'Turn ' + messages[0].turn }}"
    chat = [{"role": "user", "content": "hi", "turn": 1}]
    with pytest.raises(ValueError, match=r"row 0 .*rejects a chat of user: can only concatenate str .*; change"):
        loader([row(chat)], tokenizer=tokenizer).read(range(1))


@pytest.mark.parametrize(
    ("truth", "text"),
    [
        *(("7", "7"), ("", ""), (7, "7"), (0.5, "0.5"), (True, "true"), (["a", "b"], '["a", "b"]'), ("é", "é")),
        *((b"7", "7"), ("é".encode(), "é"), (b"", ""), (Decimal("12.50"), "12.50"), (Decimal(-3), "-3")),
        *((date(2024, 2, 1), "2024-02-01"), (time(9, 30), "09:30:00")),
        *((datetime(2024, 2, 1, 9, 30), "2024-02-01T09:30:00"), (timedelta(hours=1), "1:00:00")),
        ([Decimal("0.50"), Decimal(2)], "[0.5, 2]"),
        ([date(2024, 2, 1)], '["2024-02-01"]'),
        ({"a": b"7", "b": Decimal("1.5")}, '{"a": "7", "b": 1.5}'),
    ],
)
def test_ground_truths_become_text(loader: Callable[..., PromptLoader], truth: Any, text: str) -> None:
    assert loader([row("p", truth)]).read(range(1)).columns["answer"].strings() == [text]


def test_a_ground_truth_of_other_bytes_is_refused(loader: Callable[..., PromptLoader]) -> None:
    with pytest.raises(ValueError, match=r"row 1 .*ground_truth has bytes that are no text"):
        loader([row("p", b"7"), row("p", b"\xff")]).read(range(2))


def test_bytes_in_extra_info_become_text_or_base64(loader: Callable[..., PromptLoader]) -> None:
    extra = {"name": b"sum", "image": b"\xff\xd8", "price": Decimal("1.50"), "day": date(2024, 2, 1)}
    (text,) = loader([row("p", extra_info=extra)]).read(range(1)).columns["extra_info"].strings()
    assert json.loads(text) == {"name": "sum", "image": "/9g=", "price": 1.5, "day": "2024-02-01"}


def test_a_missing_ground_truth_is_empty_text(loader: Callable[..., PromptLoader]) -> None:
    piece = loader([row("p", "7"), row("p", None), {**row("p"), "reward_model": None}]).read(range(3))
    assert piece.columns["answer"].strings() == ["7", "", ""]


def test_sources_and_extra_info_come_along(loader: Callable[..., PromptLoader]) -> None:
    extra = {"index": 3, "note": "für"}
    piece = loader([row("a", extra_info=extra), {**row("b", extra_info=None), "data_source": None}]).read(range(2))
    assert piece.columns["data_source"].strings() == ["demo", "train"]
    assert [json.loads(text) for text in piece.columns["extra_info"].strings()] == [extra, {}]
    assert loader([row("a")]).read(range(1)).columns["extra_info"].strings() == ["{}"]


@pytest.mark.parametrize("extra", ["plain text", '{"a": 1}', {"index": 3, "split": "train"}])
def test_extra_info_of_any_kind_comes_back_from_its_json(loader: Callable[..., PromptLoader], extra: Any) -> None:
    (text,) = loader([row("p", extra_info=extra)]).read(range(1)).columns["extra_info"].strings()
    assert json.loads(text) == extra


def test_other_columns_do_not_matter(loader: Callable[..., PromptLoader]) -> None:
    piece = loader([row("a", ability="math", images=[b"\x00"], agent_name="x")]).read(range(1))
    assert texts(piece) == ["a"]
    assert set(piece.columns) == {"prompt_tokens", "messages", "answer", "data_source", "extra_info"}


def test_a_character_outside_the_alphabet_is_named(loader: Callable[..., PromptLoader]) -> None:
    tokenizer = make_tokenizer(TokenizerSpec(kind="characters", alphabet="0123456789+="))
    rows = ["1+1=", [{"role": "user", "content": "2x3="}]]
    with pytest.raises(ValueError, match=r"row 0 .*does not know the character 'x' of the prompt '2x3='"):
        loader([row(rows[1])], tokenizer=tokenizer).read(range(1))
    assert len(loader(rows[:1], tokenizer=tokenizer).read(range(1)).columns["prompt_tokens"][0]) == 4


def test_a_token_that_the_model_has_no_row_for_is_named(loader: Callable[..., PromptLoader]) -> None:
    few = loader(["12", "1~"], vocab_size=ord("~"))
    assert texts(few.read(range(1))) == ["12"]
    with pytest.raises(ValueError, match=r"row 1 .*: the prompt has token 126 \('.*'\), .* has 126 rows"):
        few.read(range(2))


@pytest.mark.parametrize("prompt", ["", [], [{"role": "user", "content": ""}]])
def test_an_empty_prompt_is_refused_with_its_place(loader: Callable[..., PromptLoader], prompt: Any) -> None:
    filled = "ok" if isinstance(prompt, str) else [{"role": "user", "content": "ok"}]
    with pytest.raises(ValueError, match=r"prompts\.parquet, row 1 \(the first is 0\): the prompt is empty"):
        loader([row(filled), row(prompt)]).read(range(2))


def test_a_null_prompt_is_refused_with_its_place(loader: Callable[..., PromptLoader]) -> None:
    with pytest.raises(ValueError, match=r"row 1 .*the prompt is empty"):
        loader([row("ok"), row(None)]).read(range(2))


@pytest.mark.parametrize("message", [{"role": "user", "content": None}, {"role": None, "content": "x"}, None])
def test_a_message_without_role_or_content_is_refused(loader: Callable[..., PromptLoader], message: Any) -> None:
    complete = {"role": "user", "content": "fine"}
    with pytest.raises(ValueError, match=r"row 0 .*a message of the chat has no (role|content)"):
        loader([row([complete, message])]).read(range(1))


@pytest.mark.parametrize(
    ("record", "column"),
    [
        ({"data_source": "d", "reward_model": {"ground_truth": "1"}}, "prompt"),
        ({"prompt": "p", "data_source": "d"}, "reward_model"),
        ({"prompt": "p", "data_source": "d", "reward_model": {"style": "rule"}}, "reward_model.ground_truth"),
        ({"prompt": "p", "data_source": "d", "reward_model": "7"}, "reward_model.ground_truth"),
    ],
)
def test_a_missing_column_is_named(loader: Callable[..., PromptLoader], record: dict, column: str) -> None:
    with pytest.raises(ValueError, match=rf"has no column {column}; .* has: {', '.join(record)}"):
        loader([record])


def test_missing_broken_and_empty_files_are_refused(tmp_path: Path, loader: Callable[..., PromptLoader]) -> None:
    options: dict[str, Any] = {"max_prompt_tokens": 9, "overlong": "drop"}
    with pytest.raises(ValueError, match="does not exist"):
        PromptLoader(tmp_path / "no.parquet", TOKENIZER, **options)
    for content in (b"not parquet at all", b"PAR1" + b"\0" * 20 + b"PAR1"):
        (tmp_path / "bad.parquet").write_bytes(content)
        with pytest.raises(ValueError, match=r"bad\.parquet cannot be read as parquet"):
            PromptLoader(tmp_path / "bad.parquet", TOKENIZER, **options)
    empty = pa.Table.from_pylist([row("x")]).slice(0, 0)
    pq.write_table(empty, tmp_path / "empty.parquet")
    with pytest.raises(ValueError, match="has no rows"):
        PromptLoader(tmp_path / "empty.parquet", TOKENIZER, **options)
