"""A folder of adapters to start from: what is refused before an engine starts, by key, and what is accepted."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from adapter_files import write_adapters
from safetensors.numpy import load_file, save_file

from dagrl.backends.megatron.adapter_folder import CONFIG, PREFIX, WEIGHTS
from dagrl.validation import check_file

MODEL = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 16,
}
QUERY = f"{PREFIX}model.layers.1.self_attn.q_proj.lora_A.weight"
DOWN = f"{PREFIX}model.layers.0.mlp.down_proj.lora_B.weight"

Tensors = dict[str, np.ndarray]


def retensor(change: Callable[[Tensors], Tensors]) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        save_file(change(load_file(folder / WEIGHTS)), folder / WEIGHTS)

    return write


def edit(**config: Any) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        told = json.loads((folder / CONFIG).read_text())
        (folder / CONFIG).write_text(json.dumps(told | config))

    return write


@pytest.fixture
def pipeline(project) -> Callable[..., Path]:
    """The pipeline on `MODEL` with this ``lora`` section, and a folder ``adapters`` with these adapters."""

    def make(section: str, lora: dict[str, Any] | None = None) -> Path:
        write_adapters(project.folder / "adapters", MODEL, lora or {"rank": 4, "alpha": 8})
        init = ", ".join(f"{name}: {value}" for name, value in MODEL.items())
        path = project.pipeline(("    group: train\n", f"    group: train\n    lora: {section}\n"))
        lines = path.read_text().splitlines(keepends=True)
        path.write_text("".join(f"  init: {{{init}}}\n" if line.startswith("  init:") else line for line in lines))
        return path

    return make


@pytest.mark.parametrize(
    ("section", "lora"),
    [
        ("{path: adapters, rank: 4, alpha: 8}", {"rank": 4, "alpha": 8}),
        (
            "{path: adapters, rank: 4, alpha: 8, target_modules: [linear_qkv, linear_fc2]}",
            {"rank": 4, "alpha": 8, "target_modules": ["linear_qkv", "linear_fc2"]},
        ),
    ],
)
def test_adapters_of_the_model_are_accepted(pipeline, section, lora) -> None:
    engine = check_file(pipeline(section, lora)).loaded.pipeline.engines["actor"]
    assert engine.lora.path.is_absolute(), "it is relative to the pipeline file"


FAULTS: dict[str, tuple[Callable[[Path], None], str, str]] = {
    "no folder": (lambda folder: folder.rename(folder.with_name("moved")), "path", "has no adapter_config.json; name"),
    "no config": (lambda folder: (folder / CONFIG).unlink(), "path", "has no adapter_config.json; name a folder"),
    "no weights": (lambda folder: (folder / WEIGHTS).unlink(), "path", "has no adapter_model.safetensors; name"),
    "a torn config": (lambda folder: (folder / CONFIG).write_text("{"), "path", "is not a JSON object; copy the file"),
    "torn weights": (lambda folder: (folder / WEIGHTS).write_bytes(b"xy"), "path", "is no safetensors file, or is"),
    "another method": (edit(peft_type="IA3"), "path", "says peft_type: 'IA3', which these adapters do not compute"),
    "DoRA": (edit(use_dora=True), "path", "says use_dora: True"),
    "rank-stabilised": (edit(use_rslora=True), "path", "says use_rslora: True"),
    "other ranks for some": (edit(rank_pattern={"q_proj": 8}), "path", "says rank_pattern: {'q_proj': 8}"),
    "biases": (edit(bias="all"), "path", "says bias: 'all'"),
    "whole modules": (edit(modules_to_save=["lm_head"]), "path", "says modules_to_save: ['lm_head']"),
    "another rank": (edit(r=8), "rank", "have r: 8; write `rank: 8`"),
    "another alpha": (edit(lora_alpha=16), "alpha", "have lora_alpha: 16; write `alpha: 16`"),
    "a tensor of another shape": (
        retensor(lambda tensors: tensors | {DOWN: np.zeros((64, 5), "f4")}),
        "path",
        f"tensor '{DOWN}' is F32 [64, 5], and the model needs [64, 4]; take the adapters of this model",
    ),
    "integers": (retensor(lambda tensors: tensors | {DOWN: np.zeros((64, 4), "i4")}), "path", f"'{DOWN}' is I32"),
    "a missing tensor": (
        retensor(lambda tensors: {name: each for name, each in tensors.items() if name != QUERY}),
        "path",
        f"has no tensor '{QUERY}'; Megatron adapts all layers of a kind",
    ),
    "a further tensor": (
        retensor(lambda tensors: tensors | {"lm_head.lora_A.weight": np.zeros(2, "f4")}),
        "path",
        "has a tensor 'lm_head.lora_A.weight', which no adapter of this model has",
    ),
    "an own A of the query": (
        retensor(lambda tensors: tensors | {QUERY: tensors[QUERY] + 1}),
        "path",
        "differ, and Megatron's fused layer has one `A` for both; merge",
    ),
    "values only": (
        retensor(lambda tensors: {name: each for name, each in tensors.items() if "v_proj" in name}),
        "path",
        "query, key and value together",
    ),
    "fewer layers": (
        retensor(lambda tensors: {name: each for name, each in tensors.items() if "down" in name or "o_proj" in name}),
        "target_modules",
        "are of other layers; write `target_modules: [linear_proj, linear_fc2]`",
    ),
}


@pytest.mark.parametrize("case", FAULTS)
def test_adapters_that_do_not_fit_are_refused_at_their_key(project, pipeline, case: str) -> None:
    change, key, fragment = FAULTS[case]
    path = pipeline("{path: adapters, rank: 4, alpha: 8} #!")
    change(project.folder / "adapters")
    project.assert_problem(path, f"engines.actor.lora.{key}", fragment, str(project.folder / "adapters"))


def test_more_layers_than_the_sections_are_named(project, pipeline) -> None:
    path = pipeline("{path: adapters, rank: 4, alpha: 8, target_modules: [linear_qkv]} #!")
    project.assert_problem(path, "engines.actor.lora.target_modules", "write `target_modules: all-linear`")
