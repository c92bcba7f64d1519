"""The reward of pipeline.yaml: replace it by your own. It is called once for each response."""

import re

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def score(response: str, answer: str) -> float:
    """Return 1 if the last number of the response is the reference answer, else 0."""
    found = _NUMBER.findall(response)
    return float(bool(found) and found[-1].replace(",", "") == answer)
