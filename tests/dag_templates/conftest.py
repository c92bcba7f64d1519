"""A machine as the templates' comments ask for one: data made by the preprocessing scripts, and models at home."""

from __future__ import annotations

import importlib
import json
import re
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from model_folders import write_model

from dagrl.config.schema import TokenizerSpec
from dagrl.model_files.tokenizer import make_tokenizer

REPOSITORY = Path(__file__).parents[2]
_DENSE: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": True,
}
_MIXTURE = _DENSE | {
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
}
_LARGER = _DENSE | {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "tie_word_embeddings": False,
}
_SMOL: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
MODELS = {"Qwen3-1.7B": _DENSE, "Qwen3-8B": _LARGER, "Qwen3-30B-A3B": _MIXTURE, "Qwen3-30B-A3B-Base": _MIXTURE}
"""The Hugging Face configs of the models that templates name."""
PUBLISHED = {"HuggingFaceTB/SmolLM2-135M-Instruct": _SMOL}
"""The same of models that templates name by their names on the Hub."""
_COMMIT = "0123456789abcdef0123456789abcdef01234567"
_QUESTIONS = [{"question": f"How many are {n} and {n}?", "answer": f"So many.\n#### {2 * n}"} for n in range(200)]
_PROBLEMS = [{"problem": f"What is ${n} + {n}$?", "answer": str(2 * n)} for n in range(200)]
_ASKED = {"role": "user", "content": "How many are 2 and 2?"}
_PAIRS = [
    {
        name: [_ASKED, {"role": "assistant", "content": f"{sign} {n}"}]
        for name, sign in (("chosen", "+"), ("rejected", "-"))
    }
    for n in range(200)
]
_TASKS = [
    {"task_id": number, "text": "Add two numbers.", "code": "add = sum", "test_list": ["assert add(1, 2) == 3"]}
    for number in (*range(11, 31), *range(601, 801))
]
ORIGINALS: dict[str, dict[str, Any]] = {
    "gsm8k": {"train.jsonl": _QUESTIONS, "test.jsonl": _QUESTIONS[:20]},
    "gsm8k_tools": {"train.jsonl": _QUESTIONS, "test.jsonl": _QUESTIONS[:20]},
    "mbpp": {"mbpp.jsonl": _TASKS},
    "ultrafeedback": {"train.jsonl": _PAIRS, "test.jsonl": _PAIRS[:20]},
    "deepscaler": {"train/math.json": _PROBLEMS, "test/aime.json": _PROBLEMS[:20]},
}
"""Data set -> the files of its originals."""


@dataclass(frozen=True)
class Machine:
    """A copy of the templates in a folder of its own, with all that they ask for, and a home with models."""

    folder: Path
    home: Path


@pytest.fixture(scope="session")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Machine:
    """What a user has who has followed the comments of all templates."""
    folder = tmp_path_factory.mktemp("machine")
    shutil.copytree(REPOSITORY / "dag_templates", folder / "dag_templates")
    for name, config in MODELS.items():
        _make_model(folder / "home" / "models" / name, config)
    for name, config in PUBLISHED.items():
        cached = folder / "home" / "hub" / f"models--{name.replace('/', '--')}"
        _make_model(cached / "snapshots" / _COMMIT, config)
        (cached / "refs").mkdir()
        (cached / "refs" / "main").write_text(_COMMIT)
    files = {"metadata.json": '{"sharded_backend": "torch_dist"}', ".metadata": "-", "__0_0.distcp": "-"}
    for run, step in (("smollm2-sft", 80), ("tiny-sft", 100), ("tiny-hints", 150)):
        start = folder / "runs" / run / "checkpoints" / f"step_{step}" / "actor"
        start.mkdir(parents=True)
        for name, text in files.items():
            (start / name).write_text(text)
    asked = {
        match
        for template in (folder / "dag_templates").glob("*.yaml")
        for match in re.findall(r"^# +dagrl data (\w+) --local_dir (\S+)", template.read_text(), re.M)
    }
    for script, local_dir in sorted(asked):
        _prepare(script, folder / local_dir, folder / "originals" / script)
    return Machine(folder, folder / "home")


@pytest.fixture(autouse=True)
def models_of_the_hub(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine's cache of the Hub."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(machine.home / "hub"))


def _make_model(folder: Path, config: dict[str, Any]) -> None:
    """All of a Hugging Face folder; the weights are zeros that take no room on the disk."""
    write_model(folder, **config)
    make_tokenizer(TokenizerSpec(kind="bytes")).save_pretrained(folder)


def _prepare(script: str, out: Path, originals: Path) -> None:
    """Run a preprocessing script on a few rows; one that makes its data itself needs none."""
    options = ["--local_dir", str(out)]
    for name, rows in ORIGINALS.get(script, {}).items():
        file = originals / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(rows) if file.suffix == ".json" else "\n".join(map(json.dumps, rows)) + "\n")
    if script in ORIGINALS:
        options += ["--source", str(originals)]
    sys.path.append(str(REPOSITORY / "data_preprocess"))
    try:
        importlib.import_module(script).main(options)
    finally:
        sys.path.remove(str(REPOSITORY / "data_preprocess"))
