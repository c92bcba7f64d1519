"""Each recipe of dag_templates/, for three steps of the demo's task, as a user of a laptop starts it.

Others have tests of their own: the demo in test_report.py, what learns from given responses in test_offline.py,
async_grpo in test_async.py, tools in test_turns.py, two agents in test_agents.py, critics in test_ppo.py.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
REFERENCE = "kl/ref"
CHARGED = "kl/in_reward"
CRITIC = "critic/loss"
FILTER = "filter/rounds"
SIGNS: dict[str, set[str]] = {
    "grpo": {REFERENCE},
    "ppo": {REFERENCE, CHARGED, CRITIC},
    "dapo": {FILTER},
    "gspo": set(),
    "rloo": {REFERENCE, CHARGED},
    "reinforce_pp": {REFERENCE, CHARGED},
    "drgrpo": set(),
    "cispo": set(),
    "cpgd": {REFERENCE},
    "remax": {REFERENCE, CHARGED},
    "opo": set(),
    "opmd": set(),
    "grpo_moe": set(),
}
"""Recipe -> those of the metrics above that it has."""
IN_CI = ("remax",)
"""The others differ from it, and from those with tests of their own, in formulas. test_sglang.py trains a mixture."""
IN_ONE_FILE = ("ppo", "dapo", "remax")
"""Recipes with nodes or engines that `tiny.yaml` cannot know of: they have a `tiny_NAME.yaml`."""
OWN = {
    "grpo_moe": """
model: {init: {model_type: qwen3_moe, num_experts: 4, num_experts_per_tok: 2, moe_intermediate_size: 64}}
""",
}
"""Overrides that a recipe needs on a laptop: a mixture of experts."""
SMALL = ("run.steps=3", "run.validate_every=3", "run.validate_first=false", "run.save_every=null", "track=[console]")


@pytest.mark.parametrize(
    "recipe", [pytest.param(name, marks=[] if name in IN_CI else pytest.mark.soak) for name in SIGNS]
)
def test_it_trains_on_a_laptop(recipe: str, lab, tmp_path: Path) -> None:
    path = tmp_path / "tiny.yaml"
    layers = f"tiny_{recipe}" if recipe in IN_ONE_FILE else f"{recipe}, tiny"
    path.write_text(f"extends: [{layers}]\nname: {recipe}-tiny\n{OWN.get(recipe, '')}")
    run = lab.start(path, tmp_path / "run", *SMALL)
    assert run.wait() == 0, run.output
    metrics = run.metrics()
    assert [line["step"] for line in metrics] == [1, 2, 3]
    for line in metrics:
        assert {sign for sign in (REFERENCE, CHARGED, CRITIC, FILTER) if sign in line} == SIGNS[recipe]
        assert math.isfinite(line["loss/policy"])
        # The update trains on the samples' own tokens, with the weights that sampled them.
        assert line["mismatch/logprob_diff/max"] < 1e-4
        assert line["staleness/max"] == 0
    # Some of the thousand answers to sums of one digit are right by chance, and something is learned of those.
    assert max(line["grad_norm"] for line in metrics) > 0
    # Of fifteen tokens, the special ones included.
    assert metrics[-1]["entropy"] < metrics[0]["entropy"] < math.log(15)
    assert "val/reward/mean" in metrics[-1]
