"""How the policy of `tiny_multi_turn.yaml` calls its calculator, and what it gets for that."""


def calls(text):
    """A turn with a ``+`` in it is an expression to be worked out; any other is the answer."""
    return [("calculator", {"expression": text})] if "+" in text else []


def graded(turns, prompt, answer):
    """Half for a call of the prompt's expression, and only behind that the other half for the answer."""
    call, *rest = turns
    asked = right(call, prompt.removesuffix("="))
    return 0.5 * asked + (0.5 * right(rest[-1], answer) if rest and asked == 1 else 0.0)


def right(said, wanted):
    """Share of the characters that are the wanted ones; that nothing is missing or too much counts as one of them."""
    same = sum(one == other for one, other in zip(said, wanted, strict=False))
    return (same + (said == wanted)) / (max(len(said), len(wanted)) + 1)
