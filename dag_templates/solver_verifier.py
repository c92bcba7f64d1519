"""What solver and verifier say to each other in `multi_agent.yaml`."""

import numpy as np

import dagrl


@dagrl.node(reads=["prompt_tokens", "response_tokens"], writes=["prompt_tokens"])
def ask(batch):
    """The verifier's prompt: the solver's, and what the solver has answered."""
    pairs = zip(batch["prompt_tokens"], batch["response_tokens"], strict=True)
    return {"prompt_tokens": [np.concatenate(pair) for pair in pairs]}


def verdict(prompt, response, answer):
    """1 for "1" where the solver's answer is right, and for "0" where it is not."""
    is_right = prompt.rpartition("=")[2] == answer
    return float(response == ("1" if is_right else "0"))
