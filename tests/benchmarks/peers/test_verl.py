"""The comparison with verl: equal settings on both sides, the same data, and the summary."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml

from dagrl.config.loading.loader import load_pipeline
from dagrl.config.schema import TokenizerSpec
from dagrl.model_files.tokenizer import make_tokenizer

FOLDER = Path(__file__).parents[3] / "benchmarks" / "peers" / "verl"
type Load = Callable[[str], ModuleType]


@pytest.fixture
def script(benchmark_module: Load, monkeypatch: pytest.MonkeyPatch) -> Load:
    monkeypatch.syspath_prepend(str(FOLDER))
    return benchmark_module


def value_at(tree: Any, path: str) -> Any:
    for name in path.split("."):
        tree = tree[name]
    return tree


@pytest.mark.parametrize("name", ["on_policy", "one_step_off", "8b_tp2"])
def test_every_setting_is_equal_on_both_sides(script: Load, name: str, tmp_path: Path) -> None:
    cases, inputs = script("cases"), script("inputs")
    case = cases.CASES[name]
    overrides = cases.verl_arguments(case, tmp_path, tmp_path)
    verl = dict(argument.lstrip("+").split("=", 1) for argument in overrides)
    assert len(verl) == len(overrides), "no key is given twice"
    prompts = inputs.write_prompt_file(tmp_path / "prompts.parquet", case.load, 1)
    file = tmp_path / "pipeline.yaml"
    pipeline = cases.dagrl_pipeline(case, tmp_path, prompts)
    file.write_text(yaml.safe_dump(pipeline))
    resolved = load_pipeline(file).pipeline.model_dump(mode="json")
    for setting in cases.settings_of(case):
        for key in setting.verl.split():
            assert yaml.safe_load(verl[key].lower()) == yaml.safe_load(str(value_at(resolved, setting.dagrl)).lower())
    assert verl["trainer.n_gpus_per_node"] == str(case.gpus)
    assert (verl["actor_rollout_ref.rollout.free_cache_engine"] == "True") == (case.mode == "turns")
    assert ("rollout.n_gpus_per_node" in verl) == (case.mode == "apart") == ("train" in pipeline["groups"])


def test_both_read_the_same_tokens(script: Load, tmp_path: Path) -> None:
    cases, inputs = script("cases"), script("inputs")
    case = cases.Case("tiny", "tiny", "together", prompts=3, n=1, prompt_tokens=5, response_tokens=4, steps=1)
    model, prompts = inputs.write_inputs(case, tmp_path, tmp_path / "weights")
    from transformers import AutoTokenizer

    tokenizer, ours_tokenizer = AutoTokenizer.from_pretrained(model), make_tokenizer(TokenizerSpec(kind="bytes"))
    for ours, theirs in zip(
        pq.read_table(prompts).to_pylist(), pq.read_table(tmp_path / "verl_prompts.parquet").to_pylist(), strict=True
    ):
        tokens = tokenizer.apply_chat_template(theirs["prompt"], tokenize=True, return_dict=False)
        assert tokens == list(ours_tokenizer.encode(ours["prompt"][0]["content"]))
        assert len(tokens) == case.prompt_tokens
    assert script("reward").compute_score("", "abc", "0") == script("interludes").noise("abc")


def test_the_summary_has_medians_after_the_warm_up_and_the_ratio(script: Load, tmp_path: Path) -> None:
    phases = script("phases")
    file = tmp_path / "verl.jsonl"
    logged = [{"step": 0, "data": {"val/reward": 0.0}}]
    for step, seconds in enumerate((50.0, 30.0, 20.0, 28.0), start=1):
        timing = {"timing_s/step": seconds, "timing_s/gen": 0.1, "timing_s/generate_async": 10.0 * step}
        logged.append({"step": step, "data": timing})
    file.write_text("\n".join(json.dumps(line) for line in logged))
    verl = phases.medians(phases.verl_steps(file), 0, 1)
    assert verl == {"generation": 30.0, "step": 28.0}, "a step ahead, `gen` is only the wait"
    dagrl = phases.medians([{"time/step_s": 99.0}, {"time/step_s": 14.0, "time/update_s": 4.0}], 1, 1)
    assert phases.table({"verl": verl, "dagrl": dagrl}).splitlines() == [
        "seconds               verl     dagrl     ratio",
        "generation          30.000",
        "old log-probs",
        "update                         4.000",
        "weight sync",
        "step                28.000    14.000      2.00",
    ]
    assert phases.ratios({"verl": verl, "dagrl": dagrl}) == {"step": 2.0}
    with pytest.raises(ValueError, match="--steps"):
        phases.medians([{}], 0, 1)
    file.write_text("")
    with pytest.raises(ValueError, match="no step"):
        phases.verl_steps(file)


def test_the_stand_in_has_any_name_and_any_module(script: Load) -> None:
    energon = script("energon_stub")
    assert isinstance(energon.Anything[int], type)
    assert isinstance(script("energon_stub.flavors.base").Sample, type)
