"""Finds the reward of dagrl that can score a reference answer: it gives a correct response a reward above 0."""

from __future__ import annotations

import warnings

from dagrl.rewards.code.tests import read_tests
from dagrl.rewards.final_answer import GSM8K_MARK
from dagrl.rewards.math import math_reward
from dagrl.rewards.plain_number import plain_number

EXACT = "exact only"


class Scorable:
    """Finds the reward for each answer. A comparison of formulas takes milliseconds, so only some are made."""

    def __init__(self, most_formulas: int = 20_000) -> None:
        """After `most_formulas` different answers that are no plain numbers, others are not ``checked``."""
        self._most = most_formulas
        self._known: dict[str, str] = {}

    def __call__(self, answer: str) -> str:
        """``math``, ``code``, ``exact only`` if only the same text can score, ``not checked``; empty without answer."""
        text = answer.rpartition(GSM8K_MARK)[2].strip()
        if not text:
            return ""
        if plain_number(text) is not None:
            return "math"
        if answer not in self._known:
            if len(self._known) >= self._most:
                return "not checked"
            self._known[answer] = _reward_for(answer, text)
        return self._known[answer]


def _reward_for(answer: str, text: str) -> str:
    # A list of texts may be one of answers to the `math` reward.
    if answer.lstrip().startswith("{") or "assert" in answer:
        try:
            read_tests(answer)
        except ValueError:
            pass
        else:
            return "code"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scores = math_reward(text if r"\boxed" in text else rf"\boxed{{{text}}}", answer)
    return "math" if scores else EXACT
