"""The tests in a reference answer, in the forms that data sets of code have them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

SHOWN_CHARACTERS = 80


@dataclass(frozen=True, slots=True)
class ProgramTests:
    """A program is given each input on its standard input, and has to write the output that belongs to it."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class FunctionTests:
    """A function, or a method of that name of a class ``Solution``, is called, and has to return what belongs to it."""

    name: str
    arguments: tuple[list[Any], ...]
    returned: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class AssertTests:
    """Pieces of code that are run behind the response, each of which raises where that is wrong."""

    pieces: tuple[str, ...]


type Tests = ProgramTests | FunctionTests | AssertTests


def read_tests(answer: str) -> Tests:
    """The tests in a reference answer, which is JSON. ValueError with a sentence where there are none.

    - ``{"inputs": [...], "outputs": [...]}``, of programs: APPS, TACO, verl's `prime_code`. An input or output that is
      a list holds lines;
    - the same with ``"fn_name"``, of functions: an input is a list of arguments, or a text with one in JSON a line;
    - ``{"functional": CODE}`` or ``{"assert_case": [CODE, ...]}``, of asserts: verl's with a sandbox;
    - ``[CODE, ...]``, of asserts: MBPP's ``test_list``.
    """
    try:
        said = json.loads(answer)
    except ValueError as error:
        raise _unusable(answer, f"is not JSON ({error})") from error
    if isinstance(said, list):
        return _asserts(said, answer)
    if not isinstance(said, dict):
        raise _unusable(answer, "is neither an object nor a list")
    if "functional" in said:
        return _asserts([said["functional"]], answer)
    if said.get("assert_case"):
        return _asserts(said["assert_case"], answer)
    inputs, outputs, name = said.get("inputs"), said.get("outputs"), said.get("fn_name")
    if not (isinstance(inputs, list) and isinstance(outputs, list)):
        raise _unusable(answer, "has neither inputs and outputs nor asserts")
    if not inputs or len(inputs) != len(outputs):
        raise _unusable(answer, f"has {len(inputs)} inputs and {len(outputs)} outputs")
    if name:
        arguments = tuple(_arguments(each, answer) for each in inputs)
        return FunctionTests(str(name), arguments, tuple(_returned(each) for each in outputs))
    return ProgramTests(tuple(map(_text, inputs)), tuple(map(_text, outputs)))


def _asserts(pieces: Any, answer: str) -> AssertTests:
    if not (isinstance(pieces, list) and pieces and all(isinstance(each, str) and each.strip() for each in pieces)):
        raise _unusable(answer, "has asserts that are not texts of code")
    return AssertTests(tuple(pieces))


def _arguments(given: Any, answer: str) -> list[Any]:
    if isinstance(given, list):
        return given
    try:
        return [json.loads(line) for line in str(given).splitlines() if line.strip()]
    except ValueError as error:
        raise _unusable(answer, f"has the arguments {str(given)[:SHOWN_CHARACTERS]!r}, which are not JSON") from error


def _returned(expected: Any) -> Any:
    """Where arguments are texts of JSON, so is what is returned; a text that is none stands for itself."""
    if not isinstance(expected, str):
        return expected
    try:
        return json.loads(expected)
    except ValueError:
        return expected


def _text(given: Any) -> str:
    """What a program reads or writes."""
    return "\n".join(map(str, given)) if isinstance(given, list) else str(given)


def _unusable(answer: str, what: str) -> ValueError:
    shown = answer if len(answer) <= SHOWN_CHARACTERS else f"{answer[:SHOWN_CHARACTERS]} ..."
    return ValueError(f"the reference answer {shown!r} {what}; docs/rewards.md shows how tests are written")
