"""Tools: what a policy is told of them, and what it may call them with."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from pydantic import Field

from dagrl.plugins.tool import Tool, ToolArgumentError, load_tool, offered, tool


@tool
def search(
    query: str,
    kind: Literal["news", "books"] = "books",
    count: Annotated[int, Field(ge=1, description="how many")] = 3,
    *,
    url: str,
    extra_info: dict[str, Any],
) -> dict[str, Any]:
    """Look something up."""
    return {"query": query, "kind": kind, "count": count, "url": url, "row": extra_info}


def test_the_policy_sees_only_the_parameters_that_it_may_set() -> None:
    assert Tool(search, {"url": "here"}).schema == {
        "type": "function",
        "function": {
            "name": "search",
            "description": "Look something up.",
            "parameters": {
                "type": "object",
                "properties": {
                    "query": {"type": "string"},
                    "kind": {"enum": ["news", "books"], "type": "string"},
                    "count": {"type": "integer", "minimum": 1, "description": "how many"},
                },
                "required": ["query"],
            },
        },
    }


def test_a_call_gets_the_policys_arguments_the_pipelines_and_the_rows() -> None:
    found = Tool(search, {"url": "here"}).call({"query": "dag", "count": "2"}, {"index": 7})
    assert found == {"query": "dag", "kind": "books", "count": 2, "url": "here", "row": {"index": 7}}


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        ({}, "query: field required"),
        ({"query": 3}, "query: input should be a valid string"),
        ({"query": "dag", "count": 0}, "count: input should be greater than or equal to 1"),
        ({"query": "dag", "kind": "films"}, "kind: input should be 'news' or 'books'"),
        ({"query": "dag", "url": "there"}, "url: extra inputs are not permitted"),
        ({"query": "dag", "extra_info": {}}, "extra_info: extra inputs are not permitted"),
    ],
)
def test_other_arguments_are_refused_with_a_reason(arguments: dict[str, Any], fault: str) -> None:
    with pytest.raises(ToolArgumentError, match="^search does not take these arguments: .*" + re.escape(fault)):
        Tool(search, {"url": "here"}).call(arguments, {})


def test_a_function_of_no_parameters_is_a_tool() -> None:
    def today() -> str:
        """What day it is."""
        return "monday"

    assert Tool(today, {}).schema["function"]["parameters"] == {"type": "object", "properties": {}, "required": []}
    assert Tool(today, {}).call({}, {}) == "monday"


def test_a_tool_may_wait_for_others() -> None:
    async def ask(text: str) -> str:
        """Somebody else."""
        await asyncio.sleep(0)
        return text.upper()

    assert Tool(ask, {}).call({"text": "well"}, {}) == "WELL"


def test_type_hints_that_json_cannot_express_are_refused() -> None:
    class Thing: ...

    def look(thing: Thing) -> str:
        """At a thing."""

    look.__annotations__["thing"] = Thing
    with pytest.raises(ValueError, match=r"has type hints that JSON cannot express: .*Thing"):
        Tool(look, {})


def test_a_tool_without_a_word_on_itself_is_refused() -> None:
    def silent(text: str) -> str: ...

    with pytest.raises(ValueError, match="has no docstring; write one"):
        Tool(silent, {})


def test_parameters_that_have_no_names_are_refused() -> None:
    def many(*texts: str) -> str:
        """Takes what it gets."""

    with pytest.raises(ValueError, match="takes 'texts' not by name"):
        Tool(many, {})


def test_a_tool_of_the_users_own_is_found_beside_the_pipeline(tmp_path: Path) -> None:
    (tmp_path / "own_tools.py").write_text(
        "from __future__ import annotations\nimport dagrl\n\n@dagrl.tool\ndef double(number: int) -> int:\n"
        '    """Twice a number."""\n    return 2 * number\n'
    )
    found = load_tool("own_tools:double", {}, tmp_path)
    assert (found.name, found.call({"number": 4}, {})) == ("double", 8)


def test_a_row_may_name_the_tools_that_it_offers() -> None:
    tools = {"calculator": 1, "python": 2}
    assert offered(tools, {}) == tools
    assert offered(tools, {"tools": ["python", "search"]}) == {"python": 2}
    assert offered(tools, {"tools": []}) == {}
    assert offered(tools, {"tools": "not a list"}) == tools
