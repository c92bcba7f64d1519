"""Models by their names: huggingface_hub itself fetches them, from a server on this machine that answers as the Hub."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hub_server import COMMIT, HubServer
from model_folders import write_model

from dagrl.config.loading.hub import HubModel, hub_model
from dagrl.config.loading.published_configs import _CONFIGS
from dagrl.config.schema import TokenizerSpec
from dagrl.model_files.hf_config import read_json
from dagrl.model_files.tokenizer import make_tokenizer

SIZES_THERE = "hidden_size: 64, num_attention_heads: 4, num_key_value_heads: 2, intermediate_size: 128"
INIT = f"  init: {{model_type: qwen3, {SIZES_THERE}}}"
TOKENIZER = '  tokenizer: {kind: characters, alphabet: "0123456789+= "}'


def write_whole_model(folder: Path) -> None:
    """Config, weights and a tokenizer with a chat template."""
    write_model(folder, model_type="qwen3")
    make_tokenizer(TokenizerSpec(kind="characters", alphabet="0123456789+= ")).save_pretrained(folder)


@pytest.fixture(scope="module")
def hub(tmp_path_factory) -> Iterator[HubServer]:
    folder = tmp_path_factory.mktemp("published")
    write_whole_model(folder)
    (folder / "consolidated.safetensors").write_bytes(b"a copy")
    with HubServer({"org/small": folder, "org/closed": folder}, gated=frozenset({"org/closed"})) as server:
        yield server


@pytest.fixture
def dagrl(tmp_path: Path, hub: HubServer) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Calls ``dagrl`` with that hub and empty caches; ``offline=True`` with a hub that does not answer."""

    def call(*arguments: str, offline: bool = False) -> subprocess.CompletedProcess[str]:
        variables = os.environ | {
            "HF_ENDPOINT": "http://127.0.0.1:9" if offline else hub.address,
            "HF_HOME": str(tmp_path / "hf"),
            "XDG_CACHE_HOME": str(tmp_path / "cache"),
            "HF_TOKEN": "hf_secret",
            "HF_HUB_DISABLE_XET": "1",
        }
        hub.downloads.clear()
        command = [sys.executable, "-m", "dagrl", *arguments]
        return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=240)

    return call


@pytest.fixture
def named(project) -> Callable[[str], str]:
    """``named(model)``: a pipeline of the model with that name."""

    def write(model: str) -> str:
        return str(project.pipeline((INIT, f"  path: {model}"), (TOKENIZER, "")))

    return write


@pytest.mark.parametrize(
    ("text", "model"),
    [
        ("Qwen/Qwen3-8B", HubModel("hf", "Qwen/Qwen3-8B", None)),
        ("hf:Qwen/Qwen3-8B@refs/pr/1", HubModel("hf", "Qwen/Qwen3-8B", "refs/pr/1")),
        ("modelscope:Qwen/Qwen3-8B@v1", HubModel("modelscope", "Qwen/Qwen3-8B", "v1")),
        ("./models/mine", None),
        ("../models", None),
        ("/models/mine", None),
        ("~/models", None),
        ("mine", None),
        ("a/b/c", None),
    ],
)
def test_names_and_paths_are_distinguished(text: str, model: HubModel | None) -> None:
    assert hub_model(text) == model
    if model is not None:
        assert hub_model(str(model)) == model


def test_a_folder_comes_before_a_model_of_its_name(dagrl, named, project, hub) -> None:
    folder = project.folder / "org" / "small"
    folder.mkdir(parents=True)
    write_whole_model(folder)
    done = dagrl("validate", named("org/small"))
    assert done.returncode == 0, done.stderr
    assert hub.downloads == [] and "org/small@" not in done.stdout


def test_validate_fetches_small_files_once_and_names_the_commit(dagrl, named, hub) -> None:
    done = dagrl("validate", named("org/small"))
    assert done.returncode == 0, done.stderr
    assert f"org/small@{COMMIT}" in done.stdout
    assert {"config.json", "tokenizer.json"} <= set(hub.downloads)
    assert not [name for name in hub.downloads if name.endswith(".safetensors")]
    again = dagrl("validate", named("org/small"), offline=True)
    assert again.returncode == 0, again.stderr


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        ("org/none", "there is no folder `org/none`, and no such model on the Hugging Face Hub"),
        ("org/closed", "`org/closed` is gated; accept its terms"),
        ("org/small@v9", "`org/small` has no revision `v9`"),
    ],
)
def test_refusals_of_the_hub_are_one_sentence(dagrl, named, model: str, sentence: str) -> None:
    path = named(model)
    done = dagrl("validate", path)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"{path}:3: model.path: ") and sentence in line
    assert "hf_secret" not in done.stderr


def test_a_hub_that_cannot_be_reached_is_one_sentence(dagrl, named) -> None:
    path = named("org/small")
    (line,) = dagrl("validate", path, offline=True).stderr.splitlines()
    assert line.startswith(f"{path}:3: model.path: ") and "the Hub cannot be reached" in line
    (line,) = dagrl("validate", named("Qwen/Qwen3-8B"), offline=True).stderr.splitlines()
    assert "the files of `Qwen/Qwen3-8B` are not in the cache" in line


def test_known_models_are_planned_without_a_hub(dagrl) -> None:
    done = dagrl("plan", "grpo", "model.path=Qwen/Qwen3-4B", "--gpu", "H200", offline=True)
    assert done.returncode == 0, done.stderr
    assert "4.02 billion parameters" in done.stdout


def test_weights_are_fetched_before_a_run_continued_and_fetched_once(dagrl, project, named, hub, tmp_path) -> None:
    from dagrl.config.loading.loader import load_pipeline

    path = named("org/small")
    assert dagrl("validate", path).returncode == 0
    fetch = f"""
from dagrl.config.loading.hub import download
from dagrl.config.loading.loader import load_pipeline
print(download(load_pipeline({path!r}).pipeline))
"""
    variables = os.environ | {"HF_ENDPOINT": hub.address, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_DISABLE_XET": "1"}

    def download() -> list[str]:
        hub.downloads.clear()
        subprocess.run([sys.executable, "-c", fetch], env=variables, check=True, timeout=240)
        return list(hub.downloads)

    assert download() == ["model.safetensors"]
    assert download() == []
    snapshot = tmp_path / "hf" / "hub" / "models--org--small" / "snapshots" / COMMIT
    assert read_json(snapshot / "config.json")["model_type"] == "qwen3"
    assert not (snapshot / "consolidated.safetensors").exists()
    assert load_pipeline(project.pipeline((INIT, f"  path: {snapshot}"), (TOKENIZER, ""))).pipeline.model.hub is None


SIZES = {
    "Qwen/Qwen3-0.6B": 0.596,
    "Qwen/Qwen3-1.7B": 1.72,
    "Qwen/Qwen3-4B": 4.02,
    "Qwen/Qwen3-8B": 8.19,
    "Qwen/Qwen3-14B": 14.77,
    "Qwen/Qwen3-32B": 32.76,
    "Qwen/Qwen3-30B-A3B": 30.53,
    "Qwen/Qwen3-235B-A22B": 235.09,
    "Qwen/Qwen2.5-0.5B": 0.494,
    "Qwen/Qwen2.5-1.5B": 1.54,
    "Qwen/Qwen2.5-3B": 3.09,
    "Qwen/Qwen2.5-7B": 7.62,
    "Qwen/Qwen2.5-14B": 14.77,
    "Qwen/Qwen2.5-32B": 32.76,
    "Qwen/Qwen2.5-72B": 72.71,
    "meta-llama/Llama-3.2-1B": 1.24,
    "meta-llama/Llama-3.2-3B": 3.21,
    "meta-llama/Llama-3.1-8B": 8.03,
    "meta-llama/Llama-3.1-70B": 70.55,
}
"""Billions of parameters, as the models' pages on the Hub say."""


@pytest.mark.parametrize("name", SIZES)
def test_known_sizes_give_the_published_number_of_parameters(name: str) -> None:
    from dagrl.backends.families.registry import shape_of

    parameters = shape_of(_CONFIGS[name.lower()]).parameters
    assert parameters / 1e9 == pytest.approx(SIZES[name], rel=0.005)
