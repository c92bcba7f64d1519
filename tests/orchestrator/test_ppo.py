"""PPO from the pipeline file to two optimizers: a critic of its own model, and a reward model that looks on."""

from __future__ import annotations

import json
import math
from typing import Any

import pyarrow.parquet as pq
import pytest

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def ppo(lab, tmp_path_factory) -> Any:
    """Three steps; the first one trains only the critic."""
    folder = tmp_path_factory.mktemp("ppo")
    pipeline = lab.tiny_pipeline()
    small = pipeline["model"]["init"] | {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    pipeline["engines"] |= {
        "critic": {
            "backend": "megatron",
            "group": "train",
            "head": "value",
            "model": {"init": small},
            "optimizer": {"lr": 1e-2},
        },
        "judge": {"backend": "hf", "group": "rollout", "head": "reward", "max_batch_size": 4},
    }
    nodes = pipeline["nodes"]
    nodes["rollout"]["n"] = 2
    nodes["reward"]["fn"] = "rewards:even"
    nodes["judged"] = {"op": "reward_model", "engine": "judge", "write": "judged"}
    nodes["values"] = {"op": "values", "engine": "critic"}
    nodes["advantage"] = {"op": "advantage", "estimator": "gae", "lam": 0.95, "kl_in_reward": {"coef": 0.01}}
    nodes["critic"] = {"op": "critic", "engine": "critic", "mini_batch": 2, "epochs": 2}
    nodes["update"] |= {"critic_warmup": 1, "loss": {}}
    pipeline["run"] = {"steps": 3, "seed": 3, "validate_every": 3, "record": list(nodes)}
    run = lab.start(lab.write_pipeline(folder, pipeline), folder / "run")
    assert run.wait() == 0, run.output
    return run


def test_values_advantages_and_a_critic_go_through_a_step(ppo) -> None:
    lines = [line for line in ppo.metrics() if line["step"]]
    assert [line["step"] for line in lines] == [1, 2, 3]
    for line in lines:
        told = {name.removeprefix("critic/"): line[name] for name in line if name.startswith("critic/")}
        assert told.keys() == {"loss", "clip_fraction", "grad_norm", "lr", "explained_variance"}
        assert told["loss"] > 0 and told["grad_norm"] > 0 and told["lr"] == 1e-2
        assert told["explained_variance"] < 1
        assert math.isfinite(line["values/mean"]) and math.isfinite(line["returns/mean"])
    # Its head begins with zeros.
    assert lines[0]["values/mean"] == lines[0]["critic/explained_variance"] == 0 != lines[1]["values/mean"]


def test_the_policy_waits_while_its_critic_warms_up(ppo) -> None:
    first, second, third = (line for line in ppo.metrics() if line["step"])
    assert "grad_norm" not in first and "loss/policy" not in first
    assert [line["policy_version"] for line in (first, second, third)] == [1, 2, 3]
    # What the second step samples is still of the weights that the reference has.
    assert first["kl/in_reward"] == pytest.approx(0, abs=1e-6)
    assert second["kl/in_reward"] == pytest.approx(0, abs=1e-6) != third["kl/in_reward"]
    assert second["grad_norm"] > 0 and second["staleness/max"] == 0


def test_a_reward_model_scores_in_training_and_validation(ppo) -> None:
    lines = ppo.metrics()
    assert all(math.isfinite(line["reward/judged"]) for line in lines if line["step"])
    assert math.isfinite(lines[-1]["val/reward/judged"])
    assert lines[-1]["reward/cut_fraction"] == 0
    assert pq.read_table(ppo.folder / "samples" / "step_3.parquet").column("advantage").to_pylist()


def test_policy_and_critic_are_saved(ppo) -> None:
    assert {folder.name for folder in (ppo.folder / "checkpoints" / "step_3").iterdir()} >= {"actor", "critic"}


def test_all_nodes_of_a_step_are_replayed_to_the_bit(lab, ppo) -> None:
    replayed = lab.call("replay", ppo.folder, "--step", 3, "--json")
    assert replayed.returncode == 0, replayed.stderr + replayed.stdout
    told = json.loads(replayed.stdout)
    compared = told["compared"]
    assert compared.keys() == {"rollout", "reward", "judged", "old", "ref", "values", "advantage", "critic", "update"}
    assert "rollout_logprob" in compared["rollout"] and compared["advantage"] == ["advantage", "return"]
    assert "5 metrics" in compared["critic"] and any("tensors of weights" in each for each in compared["update"])
    for engine in ("actor", "critic"):
        assert f"{engine} from its start weights, through the updates of steps 1-2" in replayed.stderr
    assert told == {"step": 3, "result": "equal", "largest": 0, "compared": compared} | {
        "differences": [],
        "failure": None,
        "warnings": [],
    }
