"""``calculator``: evaluates arithmetic on the expression's syntax tree, so that no other code can run."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable

from dagrl.plugins.tool import tool

_LONGEST = 1000
"""Longest expression in characters, which keeps its tree within Python's recursion limit."""
_LARGEST_BITS = 4096
"""Largest intermediate integer in bits: about 1200 digits."""


def _rounded(number: float, *digits: int) -> float:
    # Python would compute 10 to the power of the number of digits removed.
    return round(number, *(max(digit, -_LARGEST_BITS) for digit in digits))


_BINARY: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_UNARY: dict[type[ast.unaryop], Callable[[float], float]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}
_FUNCTIONS: dict[str, Callable[..., float]] = {
    "abs": abs,
    "ceil": math.ceil,
    "floor": math.floor,
    "max": max,
    "min": min,
    "round": _rounded,
    "sqrt": math.sqrt,
}


@tool
def calculator(expression: str) -> str:
    """Evaluate an arithmetic expression, such as (3 + 4.5) * 2 ** 3.

    Allowed are numbers, + - * / // % **, parentheses, and the functions abs, ceil, floor, max, min, round, sqrt.
    """
    if len(expression) > _LONGEST:
        raise ValueError(f"an expression must have at most {_LONGEST} characters")
    try:
        tree = ast.parse(expression.strip(), mode="eval")
    except (SyntaxError, MemoryError, RecursionError) as error:
        raise ValueError(f"{expression!r} is not an arithmetic expression") from error
    try:
        return _written(_value(tree.body))
    except ZeroDivisionError as error:
        raise ValueError("division by zero") from error
    except OverflowError as error:
        raise ValueError("the result is too large") from error
    except RecursionError as error:
        raise ValueError("the expression is nested too deeply") from error


def _value(node: ast.expr) -> float:
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            return _bounded(value)
        case ast.UnaryOp(op=sign, operand=operand) if type(sign) in _UNARY:
            return _UNARY[type(sign)](_value(operand))
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            return _power(_value(left), _value(right))
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in _BINARY:
            return _bounded(_BINARY[type(sign)](_value(left), _value(right)))
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in _FUNCTIONS:
            return _called(name, [_value(argument) for argument in args])
        case _:
            raise ValueError(f"{ast.unparse(node)!r} is not arithmetic")


def _power(base: float, exponent: float) -> float:
    whole = isinstance(base, int) and isinstance(exponent, int) and abs(base) > 1
    # Checked first, because the computation could use all of the machine's memory.
    if whole and abs(exponent) * int(base).bit_length() > _LARGEST_BITS:
        raise OverflowError
    result = base**exponent
    if isinstance(result, complex):
        raise ValueError("this power of a negative number is not a real number")
    return _bounded(result)


def _called(name: str, arguments: list[float]) -> float:
    try:
        return _bounded(_FUNCTIONS[name](*arguments))
    except TypeError as error:
        raise ValueError(f"{name} does not accept {len(arguments)} such numbers") from error


def _bounded(value: float) -> float:
    if isinstance(value, int):
        if value.bit_length() > _LARGEST_BITS:
            raise OverflowError
    elif not math.isfinite(value):
        raise OverflowError
    return value


def _written(value: float) -> str:
    """Formats a number: integers without a point, others with 12 digits."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        value = int(value)
    return str(value) if isinstance(value, int) else f"{value:.12g}"
