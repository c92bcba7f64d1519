"""What a turn leads to: calls of tools, a step of the environment, or the end."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import dagrl
from dagrl.backends.tool_calls import Call
from dagrl.ops.turns.dialogue import PendingOutcome, ResponseDialogue, TurnOutcome, TurnSettings, tool_answer
from dagrl.ops.turns.jobs import JobResult, JobTimeoutError
from dagrl.ops.turns.settings import hermes_calls
from dagrl.ops.turns.template import Answer
from dagrl.plugins.environment import EnvironmentClass
from dagrl.plugins.tool import Tool, ToolUnavailableError, tool

FIELDS: dict[str, Any] = {"prompt": "guess", "answer": "7", "data_source": "", "extra_info": {"index": 3}, "seed": 11}


@tool
def double(number: int, *, extra_info: dict) -> Any:
    """Twice a number."""
    if number < 0:
        raise ValueError("only of what there is")
    if number == 0:
        raise KeyError("nothing")
    if number == 99:
        raise ToolUnavailableError("no numbers here")
    return {"double": 2 * number, "row": extra_info["index"]} if number > 5 else str(2 * number)


class Game:
    """Says what it has heard, three times."""

    closed = 0

    def __init__(self) -> None:
        self.heard: list[str] = []

    def reset(self, answer: str, seed: int) -> None:
        self.answer, self.seed = answer, seed

    def step(self, response: str) -> dagrl.Observation:
        if response == "raise":
            raise RuntimeError("no such move")
        if response == "nothing":
            return None  # type: ignore[return-value]
        self.heard.append(response)
        return dagrl.Observation(f"{response}{self.answer}/{self.seed}", float(len(self.heard)), len(self.heard) == 3)

    def close(self) -> None:
        Game.closed += 1


GAME = EnvironmentClass("games:Game", Game, {}, ("answer", "seed"))
TOOLS = TurnSettings({"double": Tool(double, {})}, hermes_calls, None, 2, ends_on_error=False)
PLAY = TurnSettings({}, lambda _: (), GAME, 2, ends_on_error=False)


def outcome(exchange: PendingOutcome) -> TurnOutcome:
    """Run the work of an exchange here and now."""
    for place, work in enumerate(exchange.work):
        if work is not None:
            assert exchange.outcome is None, "it is not over yet"
            try:
                exchange.results[place] = JobResult(1, work())
            except Exception as failure:  # noqa: BLE001 - as a job does
                exchange.results[place] = JobResult(1, failure=failure)
    assert exchange.outcome is not None
    return exchange.outcome


def hear(
    others: TurnSettings, text: str, *, cut: bool = False, last: bool = False, fields: Any = FIELDS
) -> TurnOutcome:
    return outcome(ResponseDialogue(others, fields).respond(text, cut=cut, last=last))


def call(*numbers: object) -> str:
    return "".join(
        f'<tool_call>{{"name": "double", "arguments": {{"number": {each}}}}}</tool_call>' for each in numbers
    )


def double_said(text: str) -> Answer:
    return Answer("tool", text, name="double")


def test_a_turn_without_a_call_is_the_last() -> None:
    assert hear(TOOLS, "fourteen") == TurnOutcome(ends="stop")
    assert hear(TOOLS, "fourt", cut=True) == TurnOutcome(ends="length")
    assert hear(TOOLS, "fourteen", last=True) == TurnOutcome(ends="stop")


def test_a_cut_turn_calls_no_tool() -> None:
    assert hear(TOOLS, call(3), cut=True) == TurnOutcome(ends="length")


def test_a_turn_that_ends_while_the_policy_thinks_calls_nothing() -> None:
    thinking = ResponseDialogue(TOOLS, FIELDS)
    assert outcome(thinking.respond(call(3), cut=False, last=False, thinks=True)) == TurnOutcome(ends="stop")
    reply = outcome(thinking.respond(f"so</think>{call(3)}", cut=False, last=False, thinks=True))
    assert reply.answers == (double_said("6"),)


def test_an_answer_has_the_id_of_its_call() -> None:
    others = replace(TOOLS, parse=lambda text, thinks: [Call("double", {"number": 2}, "abc123xyz")])
    assert hear(others, "").answers == (Answer("tool", "4", name="double", call_id="abc123xyz"),)


def test_calls_are_answered_in_their_order() -> None:
    assert hear(TOOLS, call(3, 4)) == TurnOutcome((double_said("6"), double_said("8")), calls=2)


def test_results_other_than_text_are_json_and_a_tool_may_read_its_row() -> None:
    assert hear(TOOLS, call(7)).answers == (double_said('{"double": 14, "row": 3}'),)


HOLDS_ITSELF: list[Any] = []
HOLDS_ITSELF.append(HOLDS_ITSELF)


@pytest.mark.parametrize(
    ("result", "told"),
    [
        ("as it is", "as it is"),
        (None, "null"),
        ({"größe": Path("a")}, '{"größe": "a"}'),
        ({(0, 1): "x"}, "{(0, 1): 'x'}"),
        (HOLDS_ITSELF, "[[...]]"),
    ],
)
def test_whatever_a_tool_returns_can_be_told(result: Any, told: str) -> None:
    assert tool_answer(JobResult(1, result)) == told


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (call(-1), "Error: only of what there is"),
        (call(0), "Error: KeyError: 'nothing'"),
        (call('"x"'), "Error: double does not take these arguments: number: input should be a valid integer"),
        ('<tool_call>{"name": "half"}</tool_call>', "Error: there is no tool 'half', only double."),
        ("<tool_call>double 3</tool_call>", "Error: a tool call must be JSON: Expecting value"),
    ],
)
def test_errors_are_reported_to_the_policy(text: str, answer: str) -> None:
    reply = hear(TOOLS, text)
    assert reply.answers[0].text.startswith(answer)
    assert (reply.ends, reply.calls, reply.failed_calls) == (None, 1, 1)


def test_too_many_calls_are_answered_with_an_error() -> None:
    reply = hear(TOOLS, call(1, 2, 3))
    assert [answer.text for answer in reply.answers] == [
        "2",
        "4",
        "Error: only the first 2 calls of a turn are answered.",
    ]
    assert (reply.calls, reply.failed_calls) == (3, 1)


def test_a_call_in_the_last_turn_is_not_made() -> None:
    exchange = ResponseDialogue(TOOLS, FIELDS).respond(call(3), cut=False, last=True)
    assert (exchange.work, exchange.outcome) == ([], TurnOutcome(ends="turns"))


def test_a_row_has_the_tools_that_it_names() -> None:
    reply = hear(TOOLS, call(3), fields={"extra_info": {"index": 0, "tools": []}})
    assert reply.answers == (double_said("Error: there is no tool 'double'."),)


def test_a_tool_that_cannot_work_here_ends_the_run() -> None:
    with pytest.raises(ToolUnavailableError, match="no numbers here"):
        hear(TOOLS, call(99))


def test_a_tool_that_takes_too_long_is_reported_to_the_policy() -> None:
    exchange = ResponseDialogue(TOOLS, FIELDS).respond(call(3), cut=False, last=False)
    exchange.results[0] = JobResult(1, failure=JobTimeoutError("no answer within 2 s"))
    assert exchange.outcome == TurnOutcome((double_said("Error: no answer within 2 s"),), calls=1, failed_calls=1)


# -- environments


def test_an_environment_answers_and_rewards_until_it_is_done() -> None:
    partner, closed = ResponseDialogue(PLAY, FIELDS), Game.closed
    replies = [outcome(partner.respond(text, cut=False, last=False)) for text in ("a", "b", "c")]
    assert replies == [
        TurnOutcome((Answer("user", "a7/11"),), reward=1.0),
        TurnOutcome((Answer("user", "b7/11"),), reward=2.0),
        TurnOutcome(ends="stop", reward=3.0),
    ]
    assert Game.closed == closed + 1
    partner.leave()
    assert Game.closed == closed + 1, "it is closed once"


@pytest.mark.parametrize(
    ("how", "ends"), [({"cut": True, "last": False}, "length"), ({"cut": False, "last": True}, "turns")]
)
def test_the_last_turn_is_rewarded_too(how: dict[str, bool], ends: str) -> None:
    assert outcome(ResponseDialogue(PLAY, FIELDS).respond("a", **how)) == TurnOutcome(ends=ends, reward=1.0)


def test_a_turn_that_calls_a_tool_is_no_move() -> None:
    both = replace(PLAY, tools=TOOLS.tools, parse=hermes_calls)
    partner = ResponseDialogue(both, FIELDS)
    assert outcome(partner.respond(call(3), cut=False, last=False)).answers == (double_said("6"),)
    assert outcome(partner.respond("a", cut=False, last=False)).reward == 1.0


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        (
            "raise",
            ValueError,
            r"the environment `games:Game` raised RuntimeError: no such move \(.*test_dialogue\.py:\d+\)",
        ),
        ("nothing", TypeError, "the environment `games:Game`: step returned None; return a dagrl.Observation"),
    ],
)
def test_an_environment_that_fails_ends_the_run_or_the_response(
    text: str, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        hear(PLAY, text)
    assert hear(replace(PLAY, ends_on_error=True), text) == TurnOutcome(ends="error")


def test_an_environment_that_takes_too_long_is_named() -> None:
    exchange = ResponseDialogue(PLAY, FIELDS).respond("a", cut=False, last=False)
    exchange.results[0] = JobResult(1, failure=JobTimeoutError("no answer within 2 s"))
    with pytest.raises(TimeoutError, match="`games:Game` gave no answer within 2 s; raise `tool_timeout_s`"):
        assert exchange.outcome


def test_an_environment_that_is_left_is_closed_once_its_step_is_over() -> None:
    gate, begun, closed = threading.Event(), threading.Event(), threading.Event()

    class Slow(Game):
        def step(self, response: str) -> dagrl.Observation:
            begun.set()
            assert gate.wait(30)
            return dagrl.Observation("so")

        def close(self) -> None:
            assert gate.is_set()
            closed.set()

    partner = ResponseDialogue(replace(PLAY, environment=replace(GAME, make=Slow)), FIELDS)
    (work,) = partner.respond("a", cut=False, last=False).work
    assert isinstance(work, Callable)
    threading.Thread(target=work, daemon=True).start()
    assert begun.wait(30)
    partner.leave()
    assert not closed.wait(0.05)
    gate.set()
    assert closed.wait(30)
