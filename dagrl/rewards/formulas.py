"""Equality of formulas in LaTeX: by their values where these decide, otherwise by math-verify.

math-verify treats a difference of two exact numbers as zero if it is below 2^-54, for numbers of any size.
"""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import replace
from fractions import Fraction
from functools import cache
from typing import TYPE_CHECKING

from dagrl.rewards.plain_number import RELATIVE, SIX_PLACES

if TYPE_CHECKING:
    from sympy import Basic, Expr, Rational, Symbol

_DEGREES = re.compile(r"\^\s*(?:\\circ|\{\s*\\circ\s*\})|\\(?:degree|deg)(?![a-z])")
_TRIGONOMETRIC = re.compile(r"\\(?:arc)?(?:sin|cos|tan|cot|sec|csc)")
_COMMAND = re.compile(r"\\[A-Za-z]+")
_IMAGINARY = re.compile(r"(?<![A-Za-z])i(?![A-Za-z])|\\(?:Re|Im|arg)(?![a-z])")
_TIMES = re.compile(
    r"(?P<factor>(?<![\w.^)])(?:\d++|\(\s*-?\d+\s*\))|\\(?:binom|frac)\{[^{}]*\}\{[^{}]*\})\s*"
    r"(?=(?<=})\d|(?:\\left\s*)?\(|\\binom|\\frac\s*(?:\{(?P<above>\d+)\}\{(?P<below>\d+)\})?)"
)
"""A whole number beside another factor that may be one: the parser would add them, as in a mixed number."""
_EQUALS = re.compile(r"(?<![\\<>!])=")

_FEW_DIGITS, _MANY_DIGITS = 30, 400
"""Digits that distinguish most values, and digits to which equal values agree."""
_MARGIN = 10
_POINTS = ((1, 1), (-1, 1), (Fraction(1, 7), Fraction(2, 7)), (53, 1), (-61, 37), (10007, 1), (-10009, 1013))
"""Sizes of the variables at even and at odd places where formulas are evaluated: far enough apart to tell an absolute
value or a root from what equals it on one side only, and some small ones, where high powers leave other terms."""


def same_formula(reference: str, said: str) -> bool:
    """Whether two formulas are equal: expressions, equations, inequalities, sets or matrices.

    An angle in degrees equals the one in radians, and the number of its degrees.
    """
    degrees = [bool(_DEGREES.search(formula)) for formula in (reference, said)]
    if any(degrees) and _same(reference, said, in_degrees=True):
        return True
    return not (all(degrees) or (any(degrees) and _TRIGONOMETRIC.search(reference + said))) and _same(reference, said)


def _same(reference: str, said: str, *, in_degrees: bool = False) -> bool:
    # A symbol equals another one only if both are assumed to be real, or none is.
    real = _is_real(reference) and _is_real(said)
    cased = _has_both_cases(reference) or _has_both_cases(said)
    ours, theirs = (_parsed(formula, real=real, cased=cased, in_degrees=in_degrees) for formula in (reference, said))
    return ours is not None and theirs is not None and equal(ours, theirs)


def _is_real(formula: str) -> bool:
    return not _IMAGINARY.search(_COMMAND.sub(" ", formula))


def _has_both_cases(formula: str) -> bool:
    letters = set(_COMMAND.sub("", formula))
    return any(letter.isupper() and letter.lower() in letters for letter in letters)


def parsed_formula(formula: str) -> Basic | None:
    """The formula as math-verify's `parse` reads one; None if it is none."""
    return _parsed(formula, real=_is_real(formula))


def _parsed(formula: str, *, real: bool, cased: bool = False, in_degrees: bool = False) -> Basic | None:
    from latex2sympy2_extended import latex2sympy, normalize_latex
    from latex2sympy2_extended.latex2sympy2 import ConversionConfig

    text = normalize_latex(_TIMES.sub(_times, _DEGREES.sub(r"^{\\circ}", formula)), _normal())
    for part in dict.fromkeys((text, _EQUALS.split(text)[-1])):
        try:
            return latex2sympy(
                part,
                is_real=real or None,
                convert_degrees=in_degrees,
                normalization_config=None,
                conversion_config=ConversionConfig(lowercase_symbols=not cased),
            )
        except (RecursionError, MemoryError):
            raise
        except Exception:  # noqa: BLE001 - the parser raises anything
            continue
    return None


def _times(match: re.Match[str]) -> str:
    above, below = int(match["above"] or 0), int(match["below"] or 0)
    is_mixed = 0 < above < below and match["factor"].isdigit()
    return match[0] if is_mixed else rf"{match['factor']}\cdot "


@cache
def _normal() -> object:
    """math-verify's settings for LaTeX, except that units stay, which have been removed before."""
    from math_verify import LatexExtractionConfig

    return replace(LatexExtractionConfig().normalization_config, units=False)


def equal(reference: Basic, said: Basic) -> bool:
    """Whether two parsed formulas are equal."""
    from math_verify import verify
    from sympy.core.relational import Relational

    try:
        decided = _decided(reference, said)
    except (RecursionError, MemoryError):
        raise
    except Exception:  # noqa: BLE001 - sympy raises anything, also where formulas make no sense
        decided = None
    if decided is not None:
        return decided
    if isinstance(reference, Relational) and isinstance(said, Relational):
        with suppress(NotImplementedError, ValueError, TypeError, AttributeError):
            if len(reference.free_symbols | said.free_symbols) == 1:
                reference, said = reference.as_set(), said.as_set()
    return verify(reference, said, numeric_precision=_MANY_DIGITS, allow_set_relation_comp=True, timeout_seconds=None)


def _decided(reference: Basic, said: Basic) -> bool | None:
    from sympy import Expr, MatrixBase

    if isinstance(reference, MatrixBase) and isinstance(said, MatrixBase):
        pairs = zip(reference.flat(), said.flat(), strict=False)
        return reference.shape == said.shape and all(equal(*pair) for pair in pairs)
    if isinstance(reference, Expr) and isinstance(said, Expr):
        return _same_values(reference, said)
    return None


def _same_values(reference: Expr, said: Expr) -> bool | None:
    """Whether two expressions have equal values wherever they are evaluated; None if that is not known."""
    from sympy import Float, Integral, Limit, Product, Rational, Sum, Symbol
    from sympy.core.function import AppliedUndef, Derivative

    both = _completed(reference), _completed(said)
    symbols = {symbol for formula in both for symbol in formula.free_symbols}
    if any(formula.has(AppliedUndef, Derivative, Integral, Limit, Product, Sum) for formula in both):
        return None
    if symbols and any(isinstance(formula, Symbol) or formula.has(Float) for formula in both):
        return None
    if any(formula.has(Float) for formula in both):
        return _agree(*both, {}, rounded=True)
    points = [_point(symbols, *sizes) for sizes in _POINTS] if symbols else [{}]
    for values in points:
        agree = _agree(*both, values)
        if not agree:
            return agree
    exact = [] if symbols else [formula.doit() for formula in both]
    if exact and all(isinstance(formula, Rational) for formula in exact):
        return bool(exact[0] == exact[1])
    return _agree(*both, points[0], digits=_MANY_DIGITS)


def _point(symbols: set[Symbol], *sizes: Fraction | int) -> dict[Symbol, Rational]:
    """Different values of the variables, about as large as the sizes."""
    from sympy import Rational

    named = enumerate(sorted(symbols, key=str))
    return {symbol: Rational(sizes[at % 2]) * Rational(1361 + 211 * at, 1009 + 10 * at) for at, symbol in named}


def _completed(formula: Expr) -> Expr:
    """With the imaginary unit, and the real odd roots of negative numbers."""
    from sympy import I, Pow, Rational

    formula = formula.xreplace({symbol: I for symbol in formula.free_symbols if symbol.name == "i"})

    def is_odd_root(power: Expr) -> bool:
        odd = isinstance(power, Pow) and isinstance(power.exp, Rational) and power.exp.q > 1 and power.exp.q % 2
        return bool(odd and power.base.is_negative)

    return formula if formula.has(I) else formula.replace(is_odd_root, _real_root)


def _real_root(power: Expr) -> Expr:
    base, exponent = power.args
    return (-1) ** exponent.p * (-base) ** exponent


def _agree(
    reference: Expr, said: Expr, at: dict[object, Rational], *, digits: int = _FEW_DIGITS, rounded: bool = False
) -> bool | None:
    """Whether two values are equal to this number of digits, or when rounded; None if one of them is not finite."""
    from sympy import Abs, Float, Max, Min

    ours, theirs = _value(reference, at, digits), _value(said, at, digits)
    if ours is None or theirs is None:
        return None
    size = Max(Abs(ours), Abs(theirs))
    tolerance = Min(SIX_PLACES, RELATIVE * size) if rounded else size * Float(10) ** (_MARGIN - digits)
    return bool(Abs(ours - theirs) <= tolerance)


def _value(formula: Expr, at: dict[object, Rational], digits: int) -> Expr | None:
    from sympy import I, Integer

    parts = formula.evalf(digits, subs=at).as_real_imag()
    if not all(map(_is_accurate, parts)):
        parts = formula.evalf(_MANY_DIGITS, subs=at).as_real_imag()
    if not all(part.is_Number and part.is_finite for part in parts):
        return None
    # All digits of a value that is zero cancel.
    real, imaginary = (part if _is_accurate(part) else Integer(0) for part in parts)
    return real + I * imaginary


def _is_accurate(number: Expr) -> bool:
    return getattr(number, "_prec", 0) != 1
