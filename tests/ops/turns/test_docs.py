"""The examples of docs/multi_turn.md, and that the page names every tool, metric and column."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dagrl.backends.tool_calls import Call
from dagrl.config.schema import TURN_COLUMNS, RolloutNode, SamplingSpec
from dagrl.ops.rollout import turn_stats
from dagrl.ops.turns.dialogue import ResponseDialogue, TurnSettings
from dagrl.ops.turns.jobs import JobResult
from dagrl.ops.turns.settings import parser_of
from dagrl.plugins.environment import load_environment
from dagrl.plugins.tool import BUILT_IN, load_tool

PAGE = (Path(__file__).parents[3] / "docs" / "multi_turn.md").read_text()
TOOL, PARSER, GAME = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "page_tools.py").write_text(TOOL + PARSER)
    (tmp_path / "page_games.py").write_text(GAME)
    return tmp_path


def test_the_tool(folder: Path) -> None:
    search = load_tool("page_tools:search", {"url": "here"}, folder)
    assert list(search.schema["function"]["parameters"]["properties"]) == ["query", "count"]
    assert search.call({"query": "dag", "count": 2}, {}) == "dag 0, from here\ndag 1, from here"


def test_the_parser(folder: Path) -> None:
    parse = parser_of("page_tools:calls", [], folder)
    assert parse("3+4") == [Call("calculator", {"expression": "3+4"})]
    assert parse("7") == []


def test_the_environment(folder: Path) -> None:
    guessing = load_environment("page_games:Guessing", {"hint": True}, folder)
    partner = ResponseDialogue(
        TurnSettings({}, lambda _: (), guessing, 1, ends_on_error=False), {"answer": "7", "seed": 1, "extra_info": {}}
    )
    replies = []
    for said in ("five?", "5", "7"):
        exchange = partner.respond(said, cut=False, last=False)
        (work,) = exchange.work
        assert work is not None
        exchange.results[0] = JobResult(1, work())
        reply = exchange.outcome
        assert reply is not None
        replies.append(([answer.text for answer in reply.answers], reply.reward, reply.ends))
    assert replies == [(["A number, please."], -0.1, None), (["larger"], 0.0, None), ([], 1.0, "stop")]


def test_examples_are_short() -> None:
    for example in (TOOL, PARSER, GAME):
        lines = [line for line in example.splitlines() if line.strip() and not line.startswith(("import", "class"))]
        assert len(lines) <= 15


def test_every_tool_column_and_metric_is_on_the_page() -> None:
    sampling = SamplingSpec(max_new_tokens=1)
    node = RolloutNode(op="rollout", engine="e", sampling=sampling, tools=("python",), environment="a:B")
    names = [*BUILT_IN, *TURN_COLUMNS, *turn_stats([], node)]
    # Some have a mean and more.
    assert [name for name in names if f"`{name}`" not in PAGE and f"`{name}/mean`" not in PAGE] == []
