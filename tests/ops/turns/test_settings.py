"""How policies write calls of tools, read."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from chatml import chatml_tokenizer

from dagrl.backends.tool_calls import Call, MalformedCall, begins_reasoning, outside_reasoning
from dagrl.ops.turns.settings import hermes_calls, parser_of
from dagrl.plugins.tool import load_tool

ONE = '<tool_call>\n{"name": "search", "arguments": {"query": "a \\"b\\"", "count": 2}}\n</tool_call>'
SEARCH = Call("search", {"query": 'a "b"', "count": 2})


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ("The answer is 7.", []),
        ("", []),
        (ONE, [SEARCH]),
        (f"I look it up.\n{ONE}\n{ONE}", [SEARCH, SEARCH]),
        # A turn may end with the closing tag as its end token, which is not part of the text.
        (ONE.removesuffix("</tool_call>"), [SEARCH]),
        ('<tool_call>{"name": "now"}</tool_call>', [Call("now", {})]),
        ('<tool_call>{"name": "f", "arguments": "{\\"x\\": 1}"}</tool_call>', [Call("f", {"x": 1})]),
        ('<tool_call>{"name": "f", "arguments": {"x": "two\nlines"}}</tool_call>', [Call("f", {"x": "two\nlines"})]),
        (f"<think>I could say {ONE}</think>\nNo need.", []),
        (f"I could say {ONE}</think>\n{ONE}", [SEARCH]),
        (f"<think>I could say {ONE}", []),
        (f"<think>first</think>Then. <think>I could say {ONE}", []),
        (f"{ONE}<think>I could say {ONE}", [SEARCH]),
        (f"<seed:think>I could say {ONE}", []),
        (f"[THINK]I could say {ONE}[/THINK]{ONE}", [SEARCH]),
    ],
)
def test_calls_in_hermes_format(text: str, calls: list[Call]) -> None:
    assert hermes_calls(text) == calls


@pytest.mark.parametrize(
    ("text", "calls"),
    [(ONE, []), (f"{ONE}</think>", []), (f"hm</think>{ONE}", [SEARCH]), (f"</think><think>{ONE}", [])],
)
def test_reasoning_that_the_prompt_has_begun_calls_nothing(text: str, calls: list[Call]) -> None:
    assert hermes_calls(text, thinks=True) == calls


@pytest.mark.parametrize(
    ("context", "begins"),
    [
        ("<|im_start|>assistant\n<think>\n", True),
        ("<|im_start|>assistant\n<think>", True),
        ("<seed:think>\n\n", True),
        ("[THINK]", True),
        ("<think>\n\n</think>\n\n", False),
        ("write <think> first", False),
        ("", False),
    ],
)
def test_a_prompt_may_begin_the_reasoning(context: str, begins: bool) -> None:
    tokenizer = chatml_tokenizer()
    assert begins_reasoning(tokenizer, np.array(tokenizer.encode(context), dtype=np.int64)) == begins


@pytest.mark.parametrize("repeated", ["a", "[", "<", "</think", "<think>", "\n"])
def test_a_long_text_takes_no_more_than_its_length(repeated: str) -> None:
    """With the square of it, this would take hours."""
    text = repeated * 1_000_000
    assert outside_reasoning(text, thinks=False) == ("" if repeated == "<think>" else text)


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("search('dag')", "a tool call must be JSON: Expecting value"),
        ('{"name": "f", "arguments": {', "a tool call must be JSON"),
        ('["f"]', 'a tool call must have a "name" and "arguments"'),
        ('{"arguments": {}}', 'a tool call must have a "name" and "arguments"'),
        ('{"name": 3, "arguments": {}}', 'a tool call must have a "name" and "arguments"'),
        ('{"name": "f", "arguments": [1]}', "the arguments of f must be a JSON object"),
        ('{"name": "f", "arguments": "x"}', "the arguments of f are not JSON"),
        ("[" * 100_000, "a tool call must be JSON"),
        ('{"name": "f", "arguments": ' + "9" * 5000 + "}", "a tool call must be JSON"),
    ],
)
def test_a_malformed_call_has_a_reason(body: str, why: str) -> None:
    (found,) = hermes_calls(f"<tool_call>{body}</tool_call>")
    assert isinstance(found, MalformedCall)
    assert found.why.startswith(why)


PARSERS = """
def brackets(text):
    if "[" not in text:
        return []
    name, _, argument = text.partition("[")
    if not argument.endswith("]"):
        raise ValueError("a bracket is not closed")
    return [(name, {"text": argument[:-1]})]

def wrong(text):
    return [text]

def broken(text):
    return [][1]
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "own_parsers.py").write_text(PARSERS)
    return tmp_path


def test_a_parser_of_the_users_own(folder: Path) -> None:
    parse = parser_of("own_parsers:brackets", [], folder)
    assert parse("no call") == []
    assert parse("echo[hello]") == [Call("echo", {"text": "hello"})]
    assert parse("echo[hello") == [MalformedCall("a bracket is not closed")]


def test_a_parser_that_returns_something_else_ends_the_run(folder: Path) -> None:
    with pytest.raises(
        ValueError,
        match=r"own_parsers:wrong \(.*own_parsers\.py:\d+\) returned 'text'; return pairs of a name and arguments",
    ):
        parser_of("own_parsers:wrong", [], folder)("text")


def test_a_parser_that_fails_ends_the_run_and_is_named_with_its_line(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"`own_parsers:broken` raised IndexError: .*own_parsers\.py:14\)"):
        parser_of("own_parsers:broken", [], folder)("text")


@pytest.mark.slow
def test_sglangs_parsers_read_the_formats_of_other_families() -> None:
    schemas = [load_tool("calculator", {}).schema]
    call = Call("calculator", {"expression": "3*4"})
    llama = parser_of("llama3", schemas)
    assert llama('<|python_tag|>{"name": "calculator", "parameters": {"expression": "3*4"}}') == [call]
    assert llama("It is twelve.") == []
    mistral = parser_of("mistral", schemas)
    assert mistral('[TOOL_CALLS] [{"name": "calculator", "arguments": {"expression": "3*4"}}]') == [call]
    qwen = parser_of("qwen25", schemas)
    assert qwen('<tool_call>\n{"name": "calculator", "arguments": {"expression": "3*4"}}\n</tool_call>') == [call]
    (unknown,) = qwen('<tool_call>\n{"name": "search", "arguments": {}}\n</tool_call>')
    assert isinstance(unknown, MalformedCall)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "text", "ids"),
    [
        ("mistral", '[TOOL_CALLS] [{"name": "search", "arguments": {"query": "x"}, "id": "a1b2c3d4e"}]', ["a1b2c3d4e"]),
        (
            "mistral",
            '[TOOL_CALLS] [{"name": "search", "arguments": {"id": "abcdefghi"}, "id": "a1b2c3d4e"}, '
            '{"name": "search", "arguments": {}, "id": "123456789"}]',
            ["a1b2c3d4e", "123456789"],
        ),
        ("mistral", '[TOOL_CALLS] [{"name": "search", "arguments": {"query": "x"}}]', [""]),
        ("mistral", '[TOOL_CALLS]search[CALL_ID]a1b2c3d4e[ARGS]{"query": "x"}', ["a1b2c3d4e"]),
        (
            "kimi_k2",
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.search:0<|tool_call_argument_begin|>"
            '{"query": "x"}<|tool_call_end|><|tool_calls_section_end|>',
            ["functions.search:0"],
        ),
        (
            "gpt-oss",
            "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary to=functions.search "
            '<|constrain|>json<|message|>{"query": "x"}',
            [""],
        ),
        ("gpt-oss", '<|channel|>commentary to=functions.search <|constrain|>json<|message|>{"query": "x"}', [""]),
        ("gpt-oss", "<|channel|>analysis<|message|>I could call search", []),
        ("gpt-oss", "<|channel|>final<|message|>7", []),
    ],
)
def test_calls_of_formats_with_ids_or_channels(name: str, text: str, ids: list[str]) -> None:
    schema = {"type": "function", "function": {"name": "search", "description": "", "parameters": {}}}
    found = parser_of(name, [schema])(text)
    assert [(call.name, call.id) for call in found] == [("search", each) for each in ids]


@pytest.mark.slow
def test_the_formats_that_validation_knows_are_sglangs() -> None:
    from sglang.srt.function_call.function_call_parser import FunctionCallParser

    from dagrl.backends.sglang.tool_parsers import parser_names

    assert set(parser_names()) == set(FunctionCallParser.ToolCallParserEnum)
