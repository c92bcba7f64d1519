"""Figures of a curve, and that each case is the published model with its recipe's settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from dagrl.config.loading.loader import load_pipeline


@pytest.fixture
def published(benchmark_module: Any) -> Any:
    return benchmark_module("published_model")


def test_figures_of_a_curve(published: Any) -> None:
    metrics = [{"step": 0, "val/reward/mean": 0.3}]
    metrics += [{"step": step, "time/step_s": 2.0, "reward/mean": 0.5} for step in (1, 2, 3, 4)]
    metrics[2]["val/reward/mean"] = 0.65
    metrics[4]["val/reward/mean"] = 0.6
    figures = published.figures(metrics)
    assert figures["curve"] == {0: 0.3, 2: 0.65, 4: 0.6}
    assert figures["seconds"] == {0: 0.0, 2: 4.0, 4: 8.0}
    assert (figures["start"], figures["end"], figures["best"]) == (0.3, 0.6, 0.65)
    assert (figures["reached_step"], figures["reached_s"], figures["median_step_s"]) == (2, 4.0, 2.0)
    assert published.table([{"case": "grpo", "seed": 1, **figures}]).splitlines()[2] == (
        "| grpo | 1 | 0.300 | 0.600 | 0.650 | 2 | 4 | 2.00 |"
    )


def test_every_case_trains_the_published_model_on_512_samples(published: Any, tmp_path: Path) -> None:
    for case in published.CASES:
        file = tmp_path / f"{case}.yaml"
        own = published.pipeline(case, tmp_path / "model", tmp_path / "data", tmp_path / "sft", seed=3, steps=7)
        own["model"] = {"init": {"model_type": "llama"}, "path": None, "tokenizer": {"kind": "bytes"}}
        file.write_text(yaml.safe_dump(own))
        pipeline = load_pipeline(file).pipeline
        assert pipeline.data.prompts_per_step * pipeline.nodes["rollout"].n == 512
        assert (pipeline.run.steps, pipeline.run.seed) == (7, 3)
        # A teacher has the weights of the SFT, and its student the published ones.
        trained = "teacher" if case == "distill" else "actor"
        assert pipeline.engines[trained].dist_checkpointing_path == tmp_path / "sft/checkpoints/step_80/actor"
