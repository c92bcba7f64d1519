"""Runs whose responses have several turns: with a tool, as the template has it, and with an environment under PPO."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

pytestmark = pytest.mark.slow
TEMPLATE = Path(__file__).parents[2] / "dag_templates" / "tiny_multi_turn.yaml"
SMALL = ("run.steps=3", "run.validate_every=3", "run.validate_first=false", "run.save_every=null", "track=[console]")
GAMES = '''
import dagrl


class Even:
    """Likes even digits; two moves."""

    def reset(self, answer, seed):
        self.moves, self.answer = 0, answer

    def step(self, response):
        self.moves += 1
        liked = sum(character in "02468" for character in response) / 8
        return dagrl.Observation(self.answer, reward=liked, done=self.moves == 2)
'''


def conversations(run: Any, step: str) -> list[list[dict[str, Any]]]:
    return pq.read_table(run.folder / "samples" / f"step_{step}.parquet")["turns"].to_pylist()


@pytest.mark.soak
def test_a_policy_calls_a_tool_and_is_trained_on_its_own_tokens(lab, tmp_path: Path) -> None:
    run = lab.start(TEMPLATE, tmp_path / "run", *SMALL, "run.samples_per_step=1024")
    assert run.wait() == 0, run.output
    metrics = run.metrics()
    assert [line["step"] for line in metrics] == [1, 2, 3]
    for line in metrics:
        # The trainer's log-probs of the policy's own words are the generator's, with the tool's words before them.
        assert line["mismatch/logprob_diff/max"] < 1e-4
        assert 1 < line["turns/mean"] < line["turns/max"] == 2
        assert 0 < line["tools/failed_fraction"] < 1, "of random calls some are expressions"
        assert 0 < line["turns/observation_token_fraction"] < 0.5
        assert line["grad_norm"] > 0
    assert metrics[2]["entropy"] < metrics[0]["entropy"]
    assert "val/turns/mean" in metrics[2]
    several = [talk for talk in conversations(run, "1") if len(talk) > 1]
    assert several
    for talk in several:
        assert [passage["turn"] for passage in talk] == [1, None, 2]
        assert "+" in talk[0]["text"], "that is what a call looks like there"


def test_an_environments_rewards_reach_critic_and_policy(lab, tmp_path: Path) -> None:
    pipeline = lab.tiny_pipeline()
    pipeline["engines"]["critic"] = {
        "backend": "megatron",
        "group": "train",
        "head": "value",
        "optimizer": {"lr": 1e-2},
    }
    nodes = pipeline["nodes"]
    nodes["rollout"] |= {"environment": "games:Even", "n": 8, "sampling": {"max_new_tokens": 20}}
    nodes["reward"]["fn"] = "environment"
    nodes["values"] = {"op": "values", "engine": "critic"}
    nodes["advantage"] = {"op": "advantage", "estimator": "gae", "lam": 0.95}
    nodes["critic"] = {"op": "critic", "engine": "critic"}
    pipeline["run"] = {"steps": 2, "seed": 3, "validate_every": 2}
    path = lab.write_pipeline(tmp_path, pipeline)
    (tmp_path / "games.py").write_text(GAMES)
    run = lab.start(path, tmp_path / "run")
    assert run.wait() == 0, run.output
    first, second = run.metrics()
    for line in (first, second):
        assert line["turns/max"] == 2
        assert line["reward/mean"] == pytest.approx(line["environment/reward/mean"], rel=1e-6)
        assert line["mismatch/logprob_diff/max"] < 1e-4
        assert line["critic/loss"] > 0
    assert second["values/mean"] != 0
    table = pq.read_table(run.folder / "samples" / "step_1.parquet")
    for talk, reward in zip(table["turns"].to_pylist(), table["reward"].to_pylist(), strict=True):
        assert sum(passage["reward"] or 0 for passage in talk) == pytest.approx(reward, abs=1e-6)
