"""Layouts in which digits are added on GPUs: each is a pipeline that could run; curves end where their runs do."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml

from dagrl.backends.environments import made_environments
from dagrl.validation import check_file


@pytest.fixture
def learning(benchmark_module):
    return benchmark_module("learning")


def test_every_layout_is_a_pipeline_that_can_be(learning, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name, case in learning.CASES.items():
        if case.backend == "vllm" and "vllm" not in made_environments():
            continue
        file = tmp_path / f"{name}.yaml"
        file.write_text(yaml.safe_dump(learning.pipeline(name, 150), sort_keys=False))
        pipeline = check_file(file).loaded.pipeline
        assert sum(group.ranks for group in pipeline.groups.values()) == case.gpus, name


def test_curves_are_shown_as_far_as_they_go(learning) -> None:
    assert learning.curves({"one_gpu": [0.0] * 4 + [0.5] * 6, "two_gpus": [0.25] * 5}).splitlines() == [
        "| step | 1 | 5 | 10 |",
        "| --- | --- | --- | --- |",
        "| one gpu | 0.00 | 0.50 | 0.50 |",
        "| two gpus | 0.25 | 0.25 |  |",
    ]
