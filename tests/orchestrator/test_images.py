"""A run with images in its prompts: a tiny Qwen2.5-VL, sampled by Hugging Face and trained by Megatron."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import yaml

pytestmark = pytest.mark.slow
REPOSITORY = Path(__file__).parents[2]
TEMPLATE = REPOSITORY / "dag_templates" / "tiny_images.yaml"
LOOKING = """
import dagrl
from PIL import Image

class Looking:
    def reset(self, seed):
        self.shade = seed % 256

    def step(self, response):
        image = Image.new("RGB", (24, 16), (self.shade, 0, 255 - self.shade))
        return dagrl.Observation("=", reward=len(response) % 2, images=(image, image.resize((8, 8))))
"""


SHOWING = """
import base64, io
from PIL import Image

def shown(shade):
    file = io.BytesIO()
    Image.new("RGB", (24, 16), (shade, 0, 255 - shade)).save(file, format="PNG")
    url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
    return {"type": "image_url", "image_url": {"url": url}}

async def solve(client, row):
    messages = list(row["messages"])
    for turn in range(3):
        answer = await client.chat.completions.create(model="x", messages=messages, max_tokens=3)
        told = [shown(row["seed"] % 256), {"type": "text", "text": "="}, shown(turn)]
        messages += [answer.choices[0].message, {"role": "user", "content": told}]
    # What it was shown at first, without the row's image.
    await client.chat.completions.create(model="x", messages=messages[2:3], max_tokens=3)
    return row["seed"] % 2
"""


@pytest.fixture(scope="module")
def template(tmp_path_factory) -> tuple[Path, dict[str, Any]]:
    """A folder with a few pictures, and the template that reads them."""
    folder = tmp_path_factory.mktemp("images")
    script = [sys.executable, REPOSITORY / "data_preprocess" / "digits.py", "--local_dir", folder / "digits"]
    subprocess.run([*script, "--train", "40", "--test", "10"], check=True, capture_output=True)
    pipeline = yaml.safe_load(TEMPLATE.read_text())
    for name, file in {"train": "train", "val": "test"}.items():
        pipeline["data"][name] = str(folder / "digits" / f"{file}.parquet")
    pipeline["data"]["prompts_per_step"] = 6
    pipeline["track"] = ["console"]
    return folder, pipeline


@pytest.fixture(scope="module")
def run(lab, template) -> Any:
    folder, pipeline = template[0], copy.deepcopy(template[1])
    # Two replicas: the images of a prompt go to the rank that gets its samples.
    pipeline["groups"]["train"] = {"cpus_per_node": 2}
    pipeline["engines"]["reference"] = {"backend": "megatron", "frozen_copy_of": "actor"}
    nodes = pipeline["nodes"]
    nodes["rollout"] |= {"n": 4, "sampling": {"temperature": 1.0, "max_new_tokens": 30}}
    nodes["rollout"] |= {"environment": "looking:Looking", "max_turns": 2}
    nodes["reward"]["fn"] = "environment"
    (folder / "looking.py").write_text(LOOKING)
    nodes["ref"] = {"op": "logprob", "engine": "reference", "write": "ref_logprob"}
    nodes["update"]["loss"]["kl_coef"] = 0.1
    pipeline["run"] = {"steps": 3, "seed": 3, "save_every": 3, "validate_every": 3}
    run = lab.start(lab.write_pipeline(folder, pipeline), folder / "run")
    assert run.wait() == 0, run.output
    return run


# tests/ops/agents/test_images.py holds the rows of agents, and the tests below images from the rollout to the trainer.
@pytest.mark.soak
def test_agents_and_trainers_see_the_same(lab, template, tmp_path: Path) -> None:
    pipeline = copy.deepcopy(template[1])
    (tmp_path / "showing.py").write_text(SHOWING)
    agent = {"function": "showing:solve", "on_error": "stop", "sequences": 2}
    pipeline["nodes"]["rollout"] |= {"n": 4, "agent": agent, "sampling": {"max_new_tokens": 48}}
    pipeline["nodes"]["reward"]["fn"] = "agent"
    pipeline["run"] = {"steps": 1, "seed": 3}
    run = lab.start(lab.write_pipeline(tmp_path, pipeline), tmp_path / "run")
    assert run.wait() == 0, run.output
    (line,) = run.metrics()
    assert line["agent/requests"] > 2 and line["grad_norm"] > 0
    assert line["mismatch/logprob_diff/max"] < 1e-5
    rows = pq.read_table(run.folder / "samples" / "step_1.parquet").to_pylist()
    assert {row["prompt"] for row in rows} == {"<|image_pad|>="}
    for row in rows:
        # Only one image of the last request fits into a prompt, and the other is in the response.
        is_last = row["sample_id"] == row["trajectory"]
        assert len(row["images"]) == 1 and row["response"].startswith("<|image_pad|>" * 6) == is_last
    assert len({row["images"][0] for row in rows if row["trajectory"] == 0}) == 2
    assert len({(row["images"][0], row["thumbnails"][0]) for row in rows}) == len({row["images"][0] for row in rows})
    assert len({row["thumbnails"][0] for row in rows if row["trajectory"] == 0}) == 2


def test_generator_and_trainer_see_the_same(run) -> None:
    lines = [line for line in run.metrics() if line["step"]]
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert lines[0]["kl/ref"] == pytest.approx(0, abs=1e-6) and lines[2]["kl/ref"] > 1e-7
    for line in lines:
        assert line["grad_norm"] > 0
        assert line["mismatch/logprob_diff/max"] < 1e-5


def test_samples_name_the_images(run) -> None:
    table = pq.read_table(run.folder / "samples" / "step_1.parquet")
    names = table["images"].to_pylist()
    assert all(len(name) == 1 and name[0].startswith("sha256:") for name in names)
    assert len({name[0] for name in names}) == 6
    assert all(uri.startswith("data:image/jpeg;base64,") for (uri,) in table["thumbnails"].to_pylist())
    assert set(table["prompt"].to_pylist()) == {"<|image_pad|>="}


def test_environments_answer_with_images(run) -> None:
    turns = pq.read_table(run.folder / "samples" / "step_1.parquet")["turns"].to_pylist()
    answers = [passage["text"] for passages in turns for passage in passages if passage["turn"] is None]
    # 6 tokens, and 4 because an image has 256 pixels at least.
    assert len(answers) > 8
    assert set(answers) == {"<|image_pad|>" * 10 + "="}


def test_the_exported_model_has_a_trained_tower(run, tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForImageTextToText

    from dagrl.backends.runtime.initial_weights import weight_source
    from dagrl.cli import main
    from dagrl.config.schema import ModelSpec
    from dagrl.model_files.library_model import published_tensors

    assert main(["export", str(run.folder), "-o", str(tmp_path / "hf"), "--engine", "actor"]) == 0
    trained = published_tensors(AutoModelForImageTextToText.from_pretrained(tmp_path / "hf", dtype=torch.float32))
    section = yaml.safe_load((run.folder / "pipeline.yaml").read_text())["model"]
    source = weight_source(ModelSpec.model_validate(section), seed=3)
    assert trained.keys() == set(source.names())
    name = "visual.blocks.0.attn.qkv.weight"
    assert np.abs(trained[name].detach().numpy() - source.get(name).numpy()).max() > 1e-5
