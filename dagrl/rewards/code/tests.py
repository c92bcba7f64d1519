"""The tests in a reference answer, in the forms that data sets of code have them."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dagrl.rewards.code.assert_harness import VALUE

SHOWN_CHARACTERS = 80
_MADE_OF: dict[str, Callable[[Any], Any]] = {
    kind.__name__: kind for kind in (set, frozenset, tuple, list, dict, sorted)
}


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
class Check:
    """Code that is run behind the response, and raises where that is wrong."""

    code: str
    shows: bool = False
    """Whether it ends with a value, called `VALUE`, that is to be compared with `expected` outside."""
    expected: Any = None


@dataclass(frozen=True, slots=True)
class AssertTests:
    """An assert each, with the other statements before it; the last with those behind it, too."""

    checks: tuple[Check, ...]


type Tests = ProgramTests | FunctionTests | AssertTests


def read_tests(answer: str) -> Tests:
    """The tests in a reference answer, which is JSON. ValueError with a sentence where there are none.

    - ``{"inputs": [...], "outputs": [...]}``, of programs: APPS, TACO, verl's `prime_code`. An input or output that is
      a list holds lines;
    - the same with ``"fn_name"``, of functions: an input is a list of arguments, or a text with one in JSON a line;
    - ``{"functional": CODE}`` or ``{"assert_case": [CODE, ...]}``, of asserts, each of which is a test: verl's with a
      sandbox;
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
    try:
        return AssertTests(tuple(check for piece in pieces for check in _checks(piece)))
    except (SyntaxError, ValueError, RecursionError) as error:
        raise _unusable(answer, f"has asserts that Python cannot read ({error})") from error


def _checks(piece: str) -> list[Check]:
    """The asserts of a piece of code, each for itself; all of it where it has none on its first level."""
    statements = ast.parse(piece).body
    last = max((place for place, each in enumerate(statements) if isinstance(each, ast.Assert)), default=-1)
    before: list[ast.stmt] = []
    checks = []
    for place, statement in enumerate(statements[: last + 1]):
        if isinstance(statement, ast.Assert):
            # Nothing is left out that may test something: a loop over further cases, say.
            checks.append(_check(before, statement, statements[last + 1 :] if place == last else ()))
        else:
            before.append(statement)
    return checks or [Check(piece)]


def _check(before: Sequence[ast.stmt], statement: ast.Assert, behind: Sequence[ast.stmt]) -> Check:
    """Runs only the code of ``assert CODE == LITERAL``: who does not know the literal cannot say that it is equal."""
    match statement.test:
        case ast.Compare(left, [ast.Eq()], [right]):
            for code, literal in ((left, right), (right, left)):
                try:
                    expected = _literal(literal)
                except (ValueError, TypeError):
                    continue
                shown = ast.Assign([ast.Name(VALUE, ast.Store())], code, lineno=0)
                return Check(_source([*before, shown, *behind]), shows=True, expected=expected)
    return Check(_source([*before, statement, *behind]))


def _literal(node: ast.expr) -> Any:
    """The value of a literal, or of ``set([1, 2])`` and the like, which MBPP has often. ValueError for others."""
    match node:
        case ast.Call(ast.Name(kind), [inner], []) if kind in _MADE_OF:
            return _MADE_OF[kind](_literal(inner))
    return ast.literal_eval(node)


def _source(statements: Sequence[ast.stmt]) -> str:
    return ast.unparse(ast.Module([*statements], type_ignores=[]))


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
    """Input or output of a program."""
    return "\n".join(map(str, given)) if isinstance(given, list) else str(given)


def _unusable(answer: str, what: str) -> ValueError:
    shown = answer if len(answer) <= SHOWN_CHARACTERS else f"{answer[:SHOWN_CHARACTERS]} ..."
    return ValueError(f"the reference answer {shown!r} {what}; docs/rewards.md shows how tests are written")
