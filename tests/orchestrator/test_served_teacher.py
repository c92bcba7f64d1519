"""A real run whose teacher and reference is a SGLang server on the CPU, killed in mid-run."""

from __future__ import annotations

import json
import time

import numpy as np
import psutil
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM

from dagrl.backends.hf.weights import replace_weights
from dagrl.backends.runtime.initial_weights import weight_source
from dagrl.config.schema import ModelSpec
from dagrl.model_files.library_model import load_hf_config
from dagrl.model_files.tokenizer import load_tokenizer
from tests.orchestrator.test_sglang import scheduler_of

pytestmark = pytest.mark.slow

SEED = 3
TEACHER = ModelSpec.model_validate(
    {
        "init": {
            "model_type": "qwen3",
            "hidden_size": 48,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 12,
            "max_position_embeddings": 64,
            "tie_word_embeddings": False,
            # Far from uniform: each token has its own log-prob.
            "initializer_range": 0.3,
        },
        "tokenizer": {"kind": "characters", "alphabet": "0123456789+="},
    }
)


@pytest.fixture(scope="module")
def run(lab, tmp_path_factory):
    """A run under way that has trained for two steps, the teacher a step ahead of the trainer."""
    folder = tmp_path_factory.mktemp("served_teacher")
    pipeline = lab.tiny_pipeline()
    pipeline["groups"]["teachers"] = {"cpus_per_node": 1}
    pipeline["engines"]["teacher"] = {
        "backend": "sglang",
        "group": "teachers",
        "model": TEACHER.model_dump(exclude_unset=True),
    }
    del pipeline["engines"]["reference"]
    nodes = pipeline["nodes"]
    nodes["ref"]["engine"] = "teacher"
    nodes["teacher"] = {"op": "logprob", "engine": "teacher", "write": "teacher_logprob"}
    nodes["advantage"]["distillation"] = {"coef": 0.5}
    nodes["update"] |= {"rollout_correction": {"rollout_is": "token"}}
    pipeline["schedule"]["max_staleness"] = 1
    pipeline["run"] |= {"steps": 100_000, "save_every": 100_000, "validate_every": None, "max_restarts": 1}
    pipeline["run"] |= {"sample_logprobs": True, "samples_per_step": 32, "seed": SEED}
    del pipeline["data"]["val"]
    run = lab.start(lab.write_pipeline(folder, pipeline), folder / "run")
    run.wait_for_step(3)
    yield run
    run.process.terminate()
    run.wait()


def test_its_log_probs_are_those_of_its_own_model(run) -> None:
    assert deviation(run, 1) <= 1e-5
    assert all(np.isfinite(line["grad_norm"]) for line in run.metrics() if "grad_norm" in line)


def test_a_teacher_that_dies_is_started_again_and_says_the_same(run) -> None:
    worker = psutil.Process(json.loads((run.folder / "workers.json").read_text())["teacher/0"]["pid"])
    scheduler_of(worker).kill()
    last = run.metrics()[-1]["step"]
    run.wait_for_step(last + 4)
    assert "a process of SGLang server teacher/0 has died" in run.output
    assert "teacher/0 restarted" in run.output
    steps = [line["step"] for line in run.metrics()]
    assert steps == sorted(set(steps)), "no step is lost or trained on twice"
    until = time.monotonic() + 60
    while not path(run, last + 3).exists() and time.monotonic() < until:
        time.sleep(0.1)
    assert deviation(run, last + 3) <= 1e-5


def path(run, step: int):
    return run.folder / "samples" / f"step_{step}.parquet"


def deviation(run, step: int) -> float:
    """The largest distance of a step's log-probs from those of transformers alone."""
    tokenizer = load_tokenizer(TEACHER)
    model = AutoModelForCausalLM.from_config(load_hf_config(TEACHER), dtype=torch.float32).eval()
    source = weight_source(TEACHER, SEED)
    replace_weights(model, [(name, source.get(name)) for name in source.names()])
    worst, rows = 0.0, pq.read_table(path(run, step)).to_pylist()
    assert len(rows) == 32
    for row in rows:
        prompt, response = tokenizer.encode(row["prompt"], add_special_tokens=False), row["response_tokens"]
        with torch.no_grad():
            after = model(torch.tensor([[*prompt, *response]])).logits[0].log_softmax(-1)
        own = after[len(prompt) - 1 : -1][range(len(response)), response].numpy()
        worst = max(worst, float(np.abs(own - np.array(row["ref_logprob"])).max()))
    return worst
