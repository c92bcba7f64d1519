"""Messages and reward between solver and verifier of `multi_agent.yaml`."""

import numpy as np

import dagrl


@dagrl.node(reads=["prompt_tokens", "response_tokens"], writes=["prompt_tokens"])
def ask(batch):
    """The verifier's prompt: the solver's prompt and its answer."""
    pairs = zip(batch["prompt_tokens"], batch["response_tokens"], strict=True)
    return {"prompt_tokens": [np.concatenate(pair) for pair in pairs]}


def verdict(prompt, response, answer):
    """1 for "1" if the solver's answer is right, and for "0" if it is wrong."""
    is_right = prompt.rpartition("=")[2] == answer
    return float(response == ("1" if is_right else "0"))
