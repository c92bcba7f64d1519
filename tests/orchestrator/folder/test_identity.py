"""Messages about a pipeline that differs from the run folder's."""

from __future__ import annotations

import pytest
import yaml

from dagrl.orchestrator.folder.identity import changes

BEFORE = """
name: first
engines:
  actor: {optimizer: {lr: 1.0e-6}, parallel: {}}
run: {steps: 20}
track: [console]
"""


@pytest.mark.parametrize(
    ("after", "told"),
    [
        (BEFORE, ""),
        (BEFORE.replace("20", "40"), "run.steps 20 -> 40"),
        (BEFORE.replace("[console]", "[console, wandb]"), 'track ["console"] -> ["console", "wandb"]'),
        (BEFORE.replace("{lr: 1.0e-6}", "{}"), "engines.actor.optimizer.lr 1e-06 -> (default)"),
        (BEFORE + "api_key: abc\n", "api_key (default) -> ***"),
        (BEFORE.replace("first", "x" * 50), f"name first -> ...{'x' * 40}"),
        (
            BEFORE + "".join(f"k{number}: 1\n" for number in range(8)),
            ", ".join(f"k{number} (default) -> 1" for number in range(8)),
        ),
        (
            BEFORE + "".join(f"k{number}: 1\n" for number in range(10)),
            ", ".join(f"k{number} (default) -> 1" for number in range(8)) + " and 2 more",
        ),
    ],
)
def test_different_keys_are_reported_with_both_values(after: str, told: str) -> None:
    assert changes(yaml.safe_load(BEFORE), yaml.safe_load(after)) == told
