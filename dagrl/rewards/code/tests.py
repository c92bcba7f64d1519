"""Reads the tests in a reference answer, in the formats of common code datasets, and compares results with them."""

from __future__ import annotations

import ast
import json
import math
import re
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
    """Tests of a program: it reads each input from standard input and must write the matching output."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class FunctionTests:
    """Tests of a function, or a method of a class ``Solution``: each call must return the matching value."""

    name: str
    arguments: tuple[list[object], ...]
    returned: tuple[tuple[object, ...], ...]
    """For each call, the values that count."""


@dataclass(frozen=True, slots=True)
class Check:
    """Code that runs after the response, and raises if the response is wrong."""

    code: str
    shows: bool = False
    """Whether the code sets `VALUE`, which is compared with `expected` outside the sandbox."""
    expected: object = None


@dataclass(frozen=True, slots=True)
class AssertTests:
    """One check for each assert, with the other statements before it. The last also has the statements after it."""

    checks: tuple[Check, ...]


type Tests = ProgramTests | FunctionTests | AssertTests


def read_tests(answer: str) -> Tests:
    """Read the tests in a reference answer, which is JSON. Raises ValueError with an explanation if there are none.

    - ``{"inputs": [...], "outputs": [...]}`` for programs: APPS, TACO, verl's `prime_code`. An input or output that is
      a list contains lines;
    - the same with ``"fn_name"`` for functions: an input is a list of arguments, or a string with one JSON argument on
      each line;
    - ``{"functional": CODE}`` or ``{"assert_case": [CODE, ...]}`` for asserts, each of which is a test: verl with a
      sandbox;
    - ``[CODE, ...]`` for asserts: MBPP's ``test_list``.
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
        arguments = tuple(_arguments(given, answer) for given in inputs)
        return FunctionTests(str(name), arguments, tuple(_returned(output) for output in outputs))
    return ProgramTests(tuple(map(_text, inputs)), tuple(map(_text, outputs)))


def _asserts(pieces: object, answer: str) -> AssertTests:
    if not (isinstance(pieces, list) and pieces and all(isinstance(code, str) and code.strip() for code in pieces)):
        raise _unusable(answer, "has asserts that are not texts of code")
    try:
        return AssertTests(tuple(check for piece in pieces for check in _checks(piece)))
    except (SyntaxError, ValueError, RecursionError) as error:
        raise _unusable(answer, f"has asserts that Python cannot read ({error})") from error


def _checks(piece: str) -> list[Check]:
    """One check for each top-level assert in a piece of code, or one for all of the code if it has none."""
    statements = ast.parse(piece).body
    last = max((place for place, node in enumerate(statements) if isinstance(node, ast.Assert)), default=-1)
    before: list[ast.stmt] = []
    checks = []
    for place, statement in enumerate(statements[: last + 1]):
        if isinstance(statement, ast.Assert):
            # Keep the statements after the last assert: they may also be tests, for example a loop over more cases.
            checks.append(_check(before, statement, statements[last + 1 :] if place == last else ()))
        else:
            before.append(statement)
    return checks or [Check(piece)]


def _check(before: Sequence[ast.stmt], statement: ast.Assert, behind: Sequence[ast.stmt]) -> Check:
    """For ``assert CODE == LITERAL``, the check runs only CODE, so that the program cannot see the literal."""
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


def _literal(node: ast.expr) -> object:
    """The value of a literal, or of a call such as ``set([1, 2])``, as in MBPP. Raises ValueError for other code."""
    match node:
        case ast.Call(ast.Name(kind), [inner], []) if kind in _MADE_OF:
            return _MADE_OF[kind](_literal(inner))
    return ast.literal_eval(node)


def _source(statements: Sequence[ast.stmt]) -> str:
    return ast.unparse(ast.Module([*statements], type_ignores=[]))


def _arguments(given: object, answer: str) -> list[object]:
    if isinstance(given, list):
        return given
    try:
        return [json.loads(line) for line in str(given).splitlines() if line.strip()]
    except ValueError as error:
        raise _unusable(answer, f"has the arguments {str(given)[:SHOWN_CHARACTERS]!r}, which are not JSON") from error


def _returned(expected: object) -> tuple[object, ...]:
    """The expected values: for a string, which may be JSON or the value itself, both readings."""
    if not isinstance(expected, str):
        return (expected,)
    try:
        return (json.loads(expected), expected)
    except (ValueError, RecursionError):
        return (expected,)


def _text(given: object) -> str:
    return "\n".join(map(str, given)) if isinstance(given, list) else str(given)


def _unusable(answer: str, what: str) -> ValueError:
    shown = answer if len(answer) <= SHOWN_CHARACTERS else f"{answer[:SHOWN_CHARACTERS]} ..."
    return ValueError(f"the reference answer {shown!r} {what}; docs/rewards.md shows how tests are written")


_TOLERANCE = 1e-6
_WHOLE = re.compile(r"(-?\d+)\.0*")


def same_output(written: str, expected: str) -> bool:
    """Whether all words are equal, ignoring whitespace. Floats are equal within 1e-6, relative or absolute.

    A whole number may be written with zeros behind a point (``3.0``).
    """
    mine, theirs = written.split(), expected.split()
    return len(mine) == len(theirs) and all(map(_same_word, mine, theirs))


def same_value(returned: Any, expected: Any) -> bool:
    """Whether JSON values are equal, floats within 1e-6. The expected value may be wrapped in a list, as in APPS."""
    alone = isinstance(expected, list) and len(expected) == 1
    return _same_json(returned, expected) or (alone and _same_json(returned, expected[0]))


def _same_word(written: str, expected: str) -> bool:
    if written == expected:
        return True
    if not any(sign in expected for sign in ".eE"):
        whole = _WHOLE.fullmatch(written)
        return whole is not None and whole[1] == expected
    try:
        return _close(float(written), float(expected))
    except ValueError:
        return False


def _same_json(returned: object, expected: object) -> bool:
    if isinstance(returned, list) and isinstance(expected, list):
        return len(returned) == len(expected) and all(map(_same_json, returned, expected))
    if isinstance(returned, dict) and isinstance(expected, dict):
        return returned.keys() == expected.keys() and all(_same_json(returned[key], expected[key]) for key in returned)
    if isinstance(expected, float) and isinstance(returned, int | float) and not isinstance(returned, bool):
        return _close(returned, expected)
    return returned == expected and isinstance(returned, bool) == isinstance(expected, bool)


def _close(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE)


def decoded(data: Any) -> Any:
    """Decode a value that `encoded` of the harness wrote. Forged data can raise ValueError or TypeError."""
    if not isinstance(data, list):
        if isinstance(data, dict):
            raise ValueError("an object stands for no value")
        return data
    if not data or data[0] not in _MADE_BY:
        raise ValueError("a list stands for no value without the name of a type")
    return _MADE_BY[data[0]](data[1:])


def _bytes(parts: Sequence[Any]) -> bytes:
    (text,) = parts
    return bytes(text, "latin-1")


def _dict(items: Sequence[Any]) -> dict[Any, Any]:
    return {decoded(key): decoded(value) for key, value in items}


_MADE_BY: dict[str, Callable[[Sequence[Any]], Any]] = {
    "complex": lambda parts: complex(*parts),
    "bytes": _bytes,
    "dict": _dict,
    "list": lambda items: [decoded(item) for item in items],
    "tuple": lambda items: tuple(decoded(item) for item in items),
    "set": lambda items: {decoded(item) for item in items},
    "frozenset": lambda items: frozenset(decoded(item) for item in items),
}
