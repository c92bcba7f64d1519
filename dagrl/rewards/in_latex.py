r"""Converts answers to LaTeX that math-verify can parse: Unicode signs, programming notation, spaced thousands.

math-verify compares other notation character by character (``50\%``, ``√2``), or misreads it: ``1e3`` as 3e,
``1\,000`` as 0.
"""

from __future__ import annotations

import re
import unicodedata
from fractions import Fraction

_LONGEST = 10_000
"""Longest text that is converted, because braces within braces take quadratic time."""
_COMMAND = re.compile(r"\\[A-Za-z]+|\\.|.", re.DOTALL)
_NAMES = {
    **{rf"\{size}frac": r"\frac" for size in ("", "d", "t", "c")},
    **{rf"\{size}binom": r"\binom" for size in ("", "d", "t")},
}
"""Commands with two arguments, by the names of their sizes."""
_FONTS = {rf"\{name}" for name in ("text", "textrm", "textbf", "mathrm", "mathbf", "mathbb", "mathcal", "operatorname")}
_CHOOSE, _SQRT = r"\choose", r"\sqrt"


def with_braces(text: str) -> str:
    r"""The text with braces around the arguments of fractions, binomials, roots, and exponents that are commands."""
    if "\\" not in text or len(text) > _LONGEST:
        return text
    # From the right, so that what follows a command is complete. The last item is the leftmost one.
    items: list[str] = []
    closed: list[int] = []
    for token in reversed(_COMMAND.findall(text)):
        if token == "}":
            closed.append(len(items))
            items.append(token)
        elif token == "{" and closed:
            inside = items[closed[-1] + 1 :][::-1]
            del items[closed.pop() :]
            items.append(f"{{{_chosen(inside)}}}")
        elif token in _NAMES:
            items.append(_NAMES[token] + "".join(_argument(items, closed) for _ in range(2)))
        elif token == _SQRT:
            items.append(token + _degree(items, closed) + _argument(items, closed))
        elif token in _FONTS and items and _is_group(items[-1]):
            items.append(token + items.pop())
        elif token in ("^", "_") and items and items[-1].startswith(("\\frac", "\\binom", "\\sqrt")):
            items.append(token + _argument(items, closed))
        else:
            items.append(token)
    return _chosen(items[::-1])


def _chosen(items: list[str]) -> str:
    r"""The items of a group in order, as a binomial if ``\choose`` is among them."""
    if items.count(_CHOOSE) != 1:
        return "".join(
            item[1:-1] if item.startswith(r"{\binom") and before not in ("^", "_") else item
            for before, item in zip(["", *items], items, strict=False)
        )
    place = items.index(_CHOOSE)
    above, below = ("".join(side).strip() for side in (items[:place], items[place + 1 :]))
    return rf"\binom{{{above}}}{{{below}}}"


def _argument(items: list[str], closed: list[int]) -> str:
    """Remove the next argument from the items; empty at the end of a group."""
    _skip_spaces(items)
    if not items or not (items[-1].isalnum() or len(items[-1]) > 1) or (closed and closed[-1] == len(items) - 1):
        return ""
    argument = items.pop()
    return argument if _is_group(argument) else f"{{{argument}}}"


def _is_group(item: str) -> bool:
    return item.startswith("{") and len(item) > 1


def _skip_spaces(items: list[str]) -> None:
    while items and items[-1].isspace():
        items.pop()


def _degree(items: list[str], closed: list[int]) -> str:
    """Remove the degree of a root, in square brackets, from the items."""
    _skip_spaces(items)
    if not items or items[-1] != "[" or "]" not in items[closed[-1] if closed else 0 :]:
        return ""
    end = len(items) - 1 - items[::-1].index("]")
    taken = items[end:][::-1]
    del items[end:]
    return "".join(taken)


_SIGNS = str.maketrans(
    {
        "−": "-", "–": "-", "‐": "-", "×": r"\times ", "÷": "/", "·": r"\cdot ", "⋅": r"\cdot ", "⁄": "/", "∕": "/",
        "⩽": r"\le ", "⩾": r"\ge ", "≦": r"\le ", "≧": r"\ge ",
        "π": r"\pi ", "∞": r"\infty ", "°": r"^\circ ", "±": r"\pm ", "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ",
        "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ", "∅": r"\emptyset ", "ℝ": r"\mathbb{R}", "％": r"\%", "，": ",",
        "\u00a0": " ", "\u2009": r"\,", "\u202f": r"\,",
    }
)  # fmt: skip
_RAISED, _LOWERED = "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻", "₀₁₂₃₄₅₆₇₈₉₊₋"
_PLAIN = str.maketrans(_RAISED + _LOWERED, "0123456789+-" * 2)
_ROOT = re.compile(r"√(\d+|[a-z]|\([^()]*\))")
_PROGRAMMED = re.compile(r"(?<![\w.])(\d+(?:\.\d+)?)[eE]([+-]?\d+)(?![\w.])")
_POWER = re.compile(r"\*\*(-?\w+|\([^()]*\))")
_THOUSANDS = re.compile(r"(?<=\d)(?:,\\!|\\[,!;:]|\{,\}|(?:\\ |~)(?!\d{3} */))(?=\d{3}(?!\d))")
_SPACED_THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?: \d{3})+(?![\d/]| */)")
_THOUSANDS_OF = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?=\s?(?:\\(?:pi|sqrt)|[A-Za-z]))")
_SLANTED = re.compile(r"\\(?P<kind>[lg]eq?)(?:slant|q)(?![A-Za-z])")
_UPRIGHT = re.compile(
    r"(?P<behind>\\[A-Za-z]+)?(?:\\(?:mathrm|textrm|text|operatorname|mathsf|rm)\s*(?:\{\s*(?P<braced>[ei])\s*\}|\s(?P<bare>[ei])"
    r"(?![A-Za-z]))|\{\s*\\rm\s+(?P<rm>[ei])\s*\}|(?P<dotless>\\imath)(?![A-Za-z]))"
)
"""Euler's number and the imaginary unit, which math-verify takes for names in these fonts."""
_FACTORIAL = re.compile(r"(?P<factorial>(?:[A-Za-z]|(?<!\d)\d+)!)(?=\s*\^)")
_REPEATING = re.compile(
    r"(?<![\d.])(?P<whole>\d{1,3}(?:,\d{3})+|\d*)\.(?P<fixed>\d*)"
    r"(?:\\(?:overline|bar)\s*(?:\{\s*(?P<line>\d+)\s*\}|(?P<digit>\d))"
    r"|\\dot\s*\{?(?P<first>\d)\}?(?:(?P<between>\d*)\\dot\s*\{?(?P<last>\d)\}?)?)(?!\s*[\d_^])"
)
_LONGEST_DECIMAL = 100
_PERCENT = re.compile(r"(?:\\?%|\\text\{ *percent *\}|percent)\Z")


def in_latex(answer: str) -> str:
    """The answer in LaTeX, with known notations converted; takes linear time."""
    answer = answer.replace(r"\varnothing", r"\emptyset")
    answer = _THOUSANDS.sub("", with_braces(answer if answer.isascii() else _from_unicode(answer)))
    answer = _FACTORIAL.sub(r"(\g<factorial>)", _UPRIGHT.sub(_letter, _SLANTED.sub(r"\\\g<kind> ", answer)))
    answer = _REPEATING.sub(_fraction, answer)
    answer = _SPACED_THOUSANDS.sub(lambda match: match[0].replace(" ", ""), answer)
    answer = _THOUSANDS_OF.sub(lambda match: match[0].replace(",", ""), answer)
    return _POWER.sub(r"^{\1}", _PROGRAMMED.sub(r"\1\\times 10^{\2}", answer))


def _letter(match: re.Match[str]) -> str:
    letter = match["braced"] or match["bare"] or match["rm"] or "i"
    return f"{match['behind']} {letter}" if match["behind"] else letter


def _fraction(match: re.Match[str]) -> str:
    repeated = match["line"] or match["digit"] or match["first"] + (match["between"] or "") + (match["last"] or "")
    before = match["whole"].replace(",", "") + match["fixed"]
    if len(before + repeated) > _LONGEST_DECIMAL:
        return match[0]
    nines = 10 ** len(repeated) - 1
    value = Fraction(int(before or 0) * nines + int(repeated), nines * 10 ** len(match["fixed"]))
    return str(value) if value.denominator == 1 else rf"\frac{{{value.numerator}}}{{{value.denominator}}}"


def of_hundred(answer: str) -> str | None:
    """The number before a percent sign; None if the answer is not a percentage."""
    answer = answer.rstrip()
    match = _PERCENT.search(answer, max(len(answer) - 20, 0))
    return (answer[: match.start()].rstrip() or None) if match else None


def _from_unicode(answer: str) -> str:
    answer = _ROOT.sub(r"\\sqrt{\1}", answer)
    answer = re.sub(f"([{_RAISED}]+)", r"^{\1}", re.sub(f"([{_LOWERED}]+)", r"_{\1}", answer)).translate(_PLAIN)
    return "".join(_ascii(character) for character in answer.translate(_SIGNS))


def _ascii(character: str) -> str:
    """ASCII for digits of any script, and fractions for single characters."""
    if character.isascii():
        return character
    digit = unicodedata.decimal(character, None)
    if digit is not None:
        return str(digit)
    kind, *parts = unicodedata.decomposition(character).split() or [""]
    if kind != "<fraction>":
        return character
    above, _, below = "".join(chr(int(part, 16)) for part in parts).partition("\N{FRACTION SLASH}")
    return rf"\frac{{{above}}}{{{below}}}"
