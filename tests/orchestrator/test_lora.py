"""Runs that train low-rank adapters of a policy and of a critic, and are exported. Servers get the adapters alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from adapter_files import write_adapters

ENVIRONMENT = Path(__file__).parents[2] / ".venv-vllm"
pytestmark = pytest.mark.slow
LORA = {"rank": 4, "alpha": 8}


def tiny_pipeline(lab: Any) -> dict[str, Any]:
    pipeline = lab.tiny_pipeline()
    pipeline["model"]["init"] |= {"head_dim": 32}
    pipeline["engines"]["actor"]["lora"] = {**LORA, "merge": False}
    pipeline["nodes"]["reward"]["fn"] = "rewards:even"
    # One optimizer step, so that the first divergence is that of the start.
    del pipeline["nodes"]["update"]["mini_batch"]
    pipeline["engines"]["generator"] = {
        "group": "rollout",
        "weights_from": "actor",
        "weight_sync": {"checksum": True},
    }
    return pipeline


def completed(lab: Any, folder: Path, pipeline: dict[str, Any]) -> Any:
    run = lab.start(lab.write_pipeline(folder, pipeline), folder / "run")
    assert run.wait() == 0, run.output
    return run


@pytest.fixture(scope="module")
def run(lab, tmp_path_factory) -> Any:
    if not ENVIRONMENT.exists():
        pytest.skip("`make vllm` builds the environment of vLLM")
    pipeline = tiny_pipeline(lab)
    engines, nodes = pipeline["engines"], pipeline["nodes"]
    engines["critic"] = {**engines["actor"], "lora": LORA, "head": "value"}
    engines["generator"] |= {"backend": "vllm", "environment": str(ENVIRONMENT)}
    nodes["values"] = {"op": "values", "engine": "critic"}
    nodes["critic"] = {"op": "critic", "engine": "critic"}
    nodes["advantage"]["estimator"] = "gae"
    pipeline["run"] = {"steps": 3, "seed": 3, "save_every": 3}
    return completed(lab, tmp_path_factory.mktemp("lora"), pipeline)


def test_an_sglang_server_has_the_trainers_adapters(lab, tmp_path: Path) -> None:
    pipeline = tiny_pipeline(lab)
    pipeline["engines"]["generator"]["backend"] = "sglang"
    # From the first rollout on, which is compared with the model without them.
    write_adapters(tmp_path / "adapters", {**pipeline["model"]["init"], "vocab_size": 15}, LORA)
    pipeline["engines"]["actor"]["lora"]["path"] = "adapters"
    pipeline["run"] = {"steps": 3, "seed": 3}
    run = completed(lab, tmp_path, pipeline)
    lines = [line for line in run.metrics() if line["step"]]
    assert len(lines) == 3 and lines[0]["kl/ref"] > 1e-3
    assert all(line["mismatch/logprob_diff/max"] < 1e-5 for line in lines)
    check_adapters_are_written_in_place(run)


def check_adapters_are_written_in_place(run: Any) -> None:
    """Fail if a server has logged that it takes adapters the slow way."""
    logs = list((run.folder / "logs").glob("generator-0*.log"))
    assert logs and not any("slow" in log.read_text() for log in logs)


def test_the_reference_is_the_model_without_its_adapters(run) -> None:
    lines = [line for line in run.metrics() if line["step"]]
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert lines[0]["kl/ref"] == pytest.approx(0, abs=1e-6)
    assert lines[2]["kl/ref"] > 1e-6
    for line in lines:
        assert line["grad_norm"] > 0 and line["critic/grad_norm"] > 0
        # The server has the same adapters.
        assert line["mismatch/logprob_diff/max"] < 1e-5
    check_adapters_are_written_in_place(run)


def test_a_checkpoint_holds_the_adapters_alone(run) -> None:
    from dagrl.backends.megatron.stored.stored_tensors import StoredTensors

    step = run.folder / "checkpoints" / "step_3"
    assert all(".adapter." in name for name in StoredTensors(step / "actor").weights())
    others = [name for name in StoredTensors(step / "critic").weights() if ".adapter." not in name]
    assert others == ["output_layer.weight"]


def test_the_merged_model_is_the_base_with_the_exported_adapters(run, tmp_path: Path) -> None:
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    from dagrl.backends.runtime.initial_weights import weight_source
    from dagrl.cli import main
    from dagrl.config.schema import ModelSpec

    assert main(["export", str(run.folder), "-o", str(tmp_path / "merged"), "--engine", "actor"]) == 0
    assert main(["export", str(run.folder), "-o", str(tmp_path / "adapter"), "--engine", "actor", "--adapter"]) == 0
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    base = AutoModelForCausalLM.from_config(merged.config, dtype=torch.float32)
    fields = {"init": model_of(run.folder), "tokenizer": {"kind": "characters", "alphabet": "0123456789+="}}
    source = weight_source(ModelSpec.model_validate(fields), seed=3)
    base.load_state_dict({name: source.get(name) for name in source.names()})
    ids = torch.tensor([[1, 10, 2, 11, 3]])
    with torch.no_grad():
        before, expected = base(ids).logits, merged(ids).logits
        found = PeftModel.from_pretrained(base, str(tmp_path / "adapter"))(ids).logits
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    assert (before - expected).abs().max() > 1e-3


def model_of(run: Path) -> dict[str, Any]:
    import yaml

    fields: dict[str, Any] = yaml.safe_load((run / "pipeline.yaml").read_text())["model"]["init"]
    return fields
