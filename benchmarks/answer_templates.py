r"""Templates of answer_formats and near_misses: responses around an answer, notations of it, and near misses.

In a response ``@`` is the answer. In a notation ``@`` and a letter is a part of the answer, which the table names.
"""

from __future__ import annotations

THOUGHT = r"<think>Maybe \boxed{17}? Or <answer>3, 5</answer>? No.</think>" + "\n"
MARKS: dict[str, str] = {
    r"\boxed{X}": r"We get $2+2=4$, so it is \boxed{@}.",
    r"$\boxed{X}$": r"Therefore $\boxed{@}$.",
    r"\[\boxed{X}\]": "So\n\\[\n\\boxed{@}\n\\]\n",
    r"\boxed {X}": r"So it is $\boxed {@}$",
    r"\fbox{X}": r"So it is $\fbox{@}$.",
    r"\boxed{X.}": r"\boxed{@.}",
    r"\boxed{ X }": "\\boxed{ @ }",
    r"\boxed{\boxed{X}}": r"\boxed{\boxed{@}}",
    r"\boxed{$X$}": r"\boxed{$@$}",
    r"\boxed{\displaystyle X}": r"\boxed{\displaystyle @}",
    r"\boxed{X\,}": r"\boxed{\,@\,}",
    r"first \boxed{7}, then \boxed{X}": r"First \boxed{7}, but that was wrong, as I see on a second look: \boxed{@}.",
    r"think, \boxed{X}": THOUGHT + r"It is \boxed{@}",
    "think, <answer>X": THOUGHT + "<answer>@</answer>",
    "think, the answer is $X$": THOUGHT + "The answer is $@$.",
    "<answer>X": "We have 2 of them. <answer>@</answer>",
    "<answer> X": "<answer> @ </answer>",
    r"<answer>\nX.": "<answer>\n@.\n</answer>",
    "<answer>$X$": "<answer>$@$</answer>",
    r"<answer>\(X\)": r"<answer>\(@\)</answer>",
    r"<answer>\boxed{X}": r"<answer>\boxed{@}</answer>",
    "<answer>The answer is $X$.": "<answer>The answer is $@$.</answer>",
    "The answer is $X$.": "As 2+2=4, the answer is $@$.",
    r"The answer is: \(X\)": r"There are 7. The answer is: \(@\)",
    "the final answer is: $X$": "There are 7. Therefore, the final answer is: $@$. I hope it is correct.",
    "**Final Answer:** $X$": "There are 7.\n\n**Final Answer:** $@$",
    "Answer: $X$": "There are 7.\nAnswer: $@$",
    r"The answer is \[X\]": "The answer is\n\\[ @ \\]\n",
}
PLAIN_MARKS: dict[str, str] = {
    "The answer is X.": "As 2+2=4, the answer is @.",
    "the answer is: **X**": "There are 7, so the answer is: **@**.",
    "Answer: X": "There are 7.\nAnswer: @",
    "The answer is X, because": "The answer is @, because I checked it twice.",
    "#### X": "7 + 2 = 9\n#### @",
    "#### **X**.": "7 + 2 = 9\n#### **@**.",
    r"\boxed{**X**}": r"\boxed{**@**}",
    r"\boxed{\mathbf{X}}": r"\boxed{\mathbf{@}}",
    r"\boxed{\text{X}}": r"\boxed{\text{@}}",
    r"\boxed{\left(X\right)}": r"\boxed{\left(@\right)}",
    r"\boxed{x=X}": r"\boxed{x=@}",
    r"\boxed{x = X}": r"<answer>x = @</answer>",
}
"""For numbers in digits."""
WRONG_MARKS = (
    r"It is \boxed{@}.",
    "<answer>@</answer>",
    "<answer>$@$</answer>",
    "Therefore, the final answer is: $@$.",
)

# Numbers. d: digits, a: digits without sign, f: digits without a zero before the point, v: the value as a fraction,
# w: twice the value, n and m: numerator and denominator, k: a thousandth, t: the reference's own text.

NUMBER = {"5": "@d"}
NEGATIVE = {"−5": "−@a", "- 5": "- @a"}
POSITIVE = {"+5": "+@d"}
WHOLE = {"5.0": "@v.0", "5.00": "@v.00", r"\frac{10}{2}": r"\frac{@w}{2}", "(5)": "(@v)"}
DECIMAL = {"0.50": "@d0", r"0.5 as \frac": r"\frac{@n}{@m}"}
BELOW_ONE = {".5": "@f"}
SCIENTIFIC = {
    r"1.2\times 10^3": r"@k\times 10^3",
    r"1.2\times {} 10^3": r"@k \times 10^{3}",
    r"1.2\cdot 10^3": r"@k\cdot 10^{3}",
    "1.2e3": "@ke3",
}
THOUSANDS_SEPARATORS = {
    ",": ",", "{,}": "{,}", r"\,": r"\,", r",\!": r",\!", "space": " ", r"\ ": r"\ ", "~": "~",
    "thin space": "\u2009", "narrow space": "\u202f", "no-break space": "\u00a0", r"\;": r"\;",
}  # fmt: skip
UNITS = {
    r"5~\mathrm{cm}": r"@d~\mathrm{cm}",
    r"5\,\mathrm{cm}": r"@t\,\mathrm{cm}",
    r"5\text{ cm}": r"@t\text{ cm}",
    r"5 \text{cm}^2": r"@t \text{cm}^2",
    r"5\ \text{cm}^{2}": r"@d\ \text{cm}^{2}",
    r"5\text{ square units}": r"@t\text{ square units}",
    r"5\mbox{ inches}": r"@d \mbox{ inches}",
    r"5\ \mathrm{m/s}": r"@d\ \mathrm{m/s}",
    r"5^\circ": r"@t^\circ",
    r"5^{\circ}": r"@d^{\circ}",
    "5°": "@d°",
    r"5\text{ dollars}": r"@t\text{ dollars}",
    r"\$5": r"\$@t",
}
PLAIN_UNITS = {
    "5 cm": "@d cm",
    "5 dollars": "@d dollars",
    "5 apples": "@d apples",
    "5 degrees": "@d degrees",
    r"5\%": r"@d\%",
    "5%": "@d%",
}

# Fractions. s: sign, n and m: numerator and denominator, i and j: twice these, q and r: quotient and remainder.

FRACTION = {
    r"\frac": r"@s\frac{@n}{@m}",
    r"\dfrac": r"@s\dfrac{@n}{@m}",
    r"\tfrac": r"@s\tfrac{@n}{@m}",
    r"\cfrac": r"@s\cfrac{@n}{@m}",
    "a/b": "@s@n/@m",
    "a / b": "@s@n / @m",
    r"\frac{ a }{ b }": r"@s\frac{ @n }{ @m }",
    "unreduced": r"@s\frac{@i}{@j}",
    r"\left(\frac\right)": r"@s\left(\frac{@n}{@m}\right)",
}
NEGATIVE_FRACTION = {r"\frac{-a}{b}": r"\frac{-@n}{@m}"}
ONE_DIGIT_FRACTION = {r"\frac ab": r"@s\frac @n@m", r"\frac12": r"@s\frac@n@m"}
MIXED = {
    "3 1/2": "@s@q @r/@m",
    r"3\frac12": r"@s@q\frac{@r}{@m}",
    r"3 \frac12": r"@s@q \frac{@r}{@m}",
    r"3\,\tfrac12": r"@s@q\,\tfrac{@r}{@m}",
    r"3\ 1/2": r"@s@q\ @r/@m",
}

# Numbers with a unit. d: the number, u: the unit, e: the unit with its LaTeX.

MEASURED = {"5 for 5 cm": "@d", "spaced unit": "@d @e"}
DEGREES = {
    "5°": "@d°",
    r"5^{\circ}": r"@d^{\circ}",
    "5 degrees": "@d degrees",
    r"5\text{ degrees}": r"@d\text{ degrees}",
}
NAMED_UNIT = {r"5~\mathrm{unit}": r"@d~\mathrm{@u}", r"5\,\text{unit}": r"@d\,\text{@u}"}
WORD_UNIT = {"5 unit": "@d @u"}

# Letters and words. x: the letter or words, c: the words with a capital.

LETTER = {
    "(A)": "(@x)",
    "A": "@x",
    r"\text{(A)}": r"\text{(@x)}",
    r"\text{A}": r"\text{@x}",
    r"\textbf{(A)}": r"\textbf{(@x)}",
    r"\textbf{(A) }": r"\textbf{(@x) }",
    r"\mathrm{A}": r"\mathrm{@x}",
    r"\mathbf{(A)}": r"\mathbf{(@x)}",
}
WORDS = {
    "words": "@x",
    r"\text{words}": r"\text{@x}",
    r"\text{ words }": r"\text{ @x }",
    r"\textbf{words}": r"\textbf{@x}",
    r"\mathrm{words}": r"\mathrm{@x}",
    r"\text{Words}": r"\text{@c}",
}

# Elements: name -> what stands before, between and after them.

TUPLE = {
    "(a,b)": ("(", ",", ")"),
    "( a , b )": ("( ", " , ", " )"),
    r"\left( a, b \right)": (r"\left( ", ", ", r" \right)"),
    r"\left(a,\ b\right)": (r"\left(", r",\ ", r"\right)"),
    r"\big(a, b\big)": (r"\big(", ", ", r"\big)"),
}
LIST = {"a,b": ("", ",", ""), "a, b": ("", ", ", "")}
SET = {
    "{a,b}": (r"\{", ",", r"\}"),
    r"\left\{ a, b \right\}": (r"\left\{ ", ", ", r" \right\}"),
    r"\{\,a,\,b\,\}": (r"\{\,", r",\,", r"\,\}"),
}

# Intervals. l and h: ends, o and c: brackets, p: the plus of an infinite end.

INTERVAL = {
    "(a,b]": "@o@l,@h@c",
    "( a, b ]": "@o @l, @h @c",
    r"\left(a, b\right]": r"\left@o@l, @h\right@c",
    "+\\infty": "@o@l, @p@h@c",
}

FORMULA = {
    r"\dfrac": (r"\\frac(?![a-z])", r"\\dfrac"),
    r"\sqrt{5}": (r"\\sqrt\s*(\d)", r"\\sqrt{\1}"),
    r"2\cdot\sqrt5": (r"(?<=\d)\s*\\sqrt", r"\\cdot\\sqrt"),
    r"2 \sqrt 5": (r"(?<=\d)\s*\\sqrt", r" \\sqrt"),
    r"\left(": (r"(?<!left)\(([^()]*)(?<!right)\)", r"\\left(\1\\right)"),
    "spaced +": (r"(?<=[\w}])\s*([+=])\s*(?=[\w\\])", r" \1 "),
    "tight +": (r"(?<=[\w}])\s*([+=])\s*(?=[\w\\])", r"\1"),
    "bmatrix": ("pmatrix", "bmatrix"),
    "^{2}": (r"\^(\d)(?!\d)", r"^{\1}"),
    "π": (r"\\pi(?![a-z])", "π"),
}
"""Patterns and their replacements."""

# Near misses of a number. d: digits; b, a and c: two less, two and three more.

WRONG_NUMBER = {
    "(a, n)": "(-3, @d)",
    "a, n": "@b, @d",
    "n, a": "@d, @a",
    r"\{a, n\}": r"\{@c, @d\}",
    "a or n": r"@b \text{ or } @d",
    r"n \pm 1": r"@d \pm 1",
    "x + n": "x + @d",
}
