"""Advice of `dagrl why` followed in real runs, whose slow parts sleep."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest


@pytest.mark.soak
def test_a_planted_straggler_is_found_and_the_advice_about_it_holds(
    benchmark_module: Callable[[str], ModuleType], tmp_path: Path
) -> None:
    """One response of 64 waits three seconds for its environment; a quarter more prompts begin without it."""
    why = benchmark_module("why")
    case = why.CASES["straggler"]
    pipeline = copy.deepcopy(case.pipeline)
    pipeline["nodes"]["rollout"]["environment_args"] = {"straggler_s": 3.0}
    case = replace(case, steps=5, pipeline=pipeline)
    before = why.run(case, tmp_path / "before")
    waits = sum(seconds for _, _, cause, seconds in before.path if cause == "waits for the last responses")
    assert waits == pytest.approx(2.9, abs=0.3), "it sleeps 2.9 s longer than the others"
    assert before.straggler is not None and "lengths are alike" in before.straggler.told()
    told = why.followed(case, before, "nodes.rollout.over_sampling_batch_size", tmp_path)
    assert told["key"] == "nodes.rollout.over_sampling_batch_size=20"
    assert told["saved_s"] > 2.0
    assert told["predicted_s"] == pytest.approx(told["saved_s"], rel=why.MOST_OFF)
