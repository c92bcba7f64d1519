"""The engines of a run that only validates, and the weights that they take."""

from __future__ import annotations

import pytest

from dagrl.config.loading.loader import load_pipeline
from dagrl.graph.inference import build_graph
from dagrl.orchestrator.folder.checkpoint import RunState
from dagrl.orchestrator.run import plan_validation
from dagrl.scheduler.plan import HOST
from dagrl.validation import CheckedPipeline

VAL = ("  train: train.parquet", "  train: train.parquet\n  val: train.parquet")
RUN = ("run: {steps: 10}", "run: {steps: 10, val_only: true, record: [update]}\nprofile: {steps: [1]}")
FOLDER = ("model:\n", "model:\n  path: policy\n")
INIT = (
    "  init: {model_type: qwen3, hidden_size: 64, num_attention_heads: 4, num_key_value_heads: 2, "
    "intermediate_size: 128}\n",
    "",
)
OWN = ("    optimizer: {lr: 1e-3}", "    optimizer: {lr: 1e-3}\n    model: {path: other}")
STORED = ("    optimizer: {lr: 1e-3}", "    optimizer: {lr: 1e-3}\n    dist_checkpointing_path: stored")
STATE = RunState(7, "model")


@pytest.mark.parametrize(
    ("edits", "validated", "executors", "step"),
    [
        ((), None, {"actor", "generator"}, 0),
        ((), STATE, {"actor", "generator"}, 7),
        ((FOLDER, INIT), None, {"generator"}, 0),
        ((FOLDER, INIT), STATE, {"actor", "generator"}, 7),
        ((FOLDER, INIT, OWN), None, {"generator"}, 0),
        ((FOLDER, INIT, STORED), None, {"actor", "generator"}, 0),
    ],
)
def test_start_weights_in_a_folder_need_no_trainer(project, edits, validated, executors, step):
    loaded = load_pipeline(project.pipeline(VAL, RUN, *edits))
    checked = CheckedPipeline(loaded, build_graph(loaded.pipeline), {}, ())
    prepared = plan_validation(checked, validated)
    pipeline, plan = prepared.loaded.pipeline, prepared.plan
    assert set(plan.executors) == {HOST, *executors}
    assert plan.steps == step
    assert pipeline.run.record is pipeline.profile is None
    model = pipeline.model_of("generator")
    if OWN in edits:
        assert model.path == project.folder / "other"
    elif edits:
        assert model.path == project.folder / "policy"
