"""The pipeline of docs/your_own.md as it is, from the file to the optimizer, and a divergence that is steered."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

DOCUMENT = Path(__file__).parents[2] / "docs" / "your_own.md"
STEERED = (
    "nodes.old={op: logprob, engine: actor, write: old_logprob}",
    "nodes.advantage.kl_in_reward={coef: 0.01, target_kl: 0.001, horizon: 1000}",
)


@pytest.fixture(scope="module")
def metrics(lab, tmp_path_factory) -> list[dict[str, float]]:
    """Metrics of three steps of 32 prompts with 4 responses each."""
    folder = tmp_path_factory.mktemp("own")
    for name, text in re.findall(r"```(?:yaml|python)\n# (\S+)\n(.*?)```", DOCUMENT.read_text(), re.DOTALL):
        (folder / name).write_text(text)
    overrides = ["run.steps=3", "run.validate_first=false", "nodes.rollout.n=4", "track=[console]"]
    run = lab.start(folder / "own.yaml", folder / "run", *overrides, *STEERED)
    assert run.wait() == 0, run.output
    return run.metrics()


def test_own_node_reward_estimator_and_loss_train(metrics):
    assert [line["step"] for line in metrics] == [1, 2, 3]
    for line in metrics:
        assert line["grad_norm"] > 0
        # Not 0 or 1 alone, as dagrl's own reward would be.
        assert 0 < line["reward/mean"] < 1
        assert line["ratio/clip_fraction"] == 0


def test_the_weight_of_the_divergence_follows_its_target(metrics):
    weights, divergences = ([line[f"kl/reward_{what}"] for line in metrics] for what in ("weight", "divergence"))
    assert (weights[0], divergences[0]) == (0.01, pytest.approx(0, abs=1e-6))
    # 128 samples on a horizon of 1000: where the policy is still the reference, the weight shrinks by 0.2 * 0.128.
    assert weights[1] == pytest.approx(0.01 * (1 - 0.2 * 0.128), rel=1e-6)
    error = min(max(divergences[1] / 0.001 - 1, -0.2), 0.2)
    assert weights[2] == pytest.approx(weights[1] * (1 + error * 0.128), rel=1e-6)
