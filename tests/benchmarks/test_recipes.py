"""When a recipe counts as learned, how its curve is shown, and that each is a pipeline of the demo's size."""

from __future__ import annotations

import pytest
import yaml

from dagrl.config.loading.loader import load_pipeline


@pytest.fixture
def recipes(benchmark_module):
    return benchmark_module("recipes")


def test_one_good_step_is_not_enough(recipes) -> None:
    metrics = [{"reward/mean": reward} for reward in [0.0] * 5 + [1.0] * 15]
    # Steps 6 to 14 are nine good ones and one that is not: 0.9 is not above 0.9.
    assert recipes.learned_at(metrics) == 15
    assert recipes.learned_at(metrics[:14]) is None
    assert recipes.learned_at([{"reward/mean": 1.0}] * 9) is None


def test_a_filter_does_not_hide_what_is_right_already(recipes) -> None:
    assert recipes.rewards_of([{"reward/mean": 0.5, "filter/reward/mean": 0.95}, {"reward/mean": 0.25}]) == [0.95, 0.25]


def test_curves_are_shown_as_far_as_they_go(recipes) -> None:
    short = {"recipe": "gspo", "seed": 1, "steps": 12, "learned_at": 12, "median_step_s": 0.25, "reward": [0.5] * 12}
    long = short | {"recipe": "grpo", "steps": 21, "learned_at": None, "reward": [0.25] * 21}
    assert recipes.tables([short, long]).splitlines() == [
        "| recipe | seed | above 0.9 at step | s a step | 1 | 10 | 20 |",
        "|---|---|---|---|---|---|---|",
        "| grpo | 1 | never | 0.25 | 0.25 | 0.25 | 0.25 |",
        "| gspo | 1 | 12 | 0.25 | 0.50 | 0.50 |  |",
    ]


def test_every_recipe_has_the_demos_model_and_batch(recipes, tmp_path) -> None:
    for recipe in recipes.RECIPES:
        file = tmp_path / f"{recipe}.yaml"
        file.write_text(yaml.safe_dump(recipes.pipeline(recipe, seed=3, steps=7)))
        pipeline = load_pipeline(file).pipeline
        assert pipeline.model.init is not None and pipeline.model.init["hidden_size"] == 64
        assert (pipeline.data.prompts_per_step, pipeline.nodes["rollout"].n) == (64, 16)
        assert (pipeline.run.steps, pipeline.run.seed) == (7, 3)
        assert all(group.is_cpu for group in pipeline.groups.values())
