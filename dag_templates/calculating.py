"""Tool calls and reward of `tiny_multi_turn.yaml`."""


def calls(text):
    """A turn with a ``+`` is an expression for the calculator; any other turn is the answer."""
    return [("calculator", {"expression": text})] if "+" in text else []


def graded(turns, prompt, answer):
    """One half for a call with the prompt's expression, and only then the other half for the answer."""
    call, *rest = turns
    asked = right(call, prompt.removesuffix("="))
    return 0.5 * asked + (0.5 * right(rest[-1], answer) if rest and asked == 1 else 0.0)


def right(said, wanted):
    """Share of right characters; the right length counts as one more character."""
    same = sum(one == other for one, other in zip(said, wanted, strict=False))
    return (same + (said == wanted)) / (max(len(said), len(wanted)) + 1)
