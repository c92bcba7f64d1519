"""`dagrl doctor model` on configs as they are published, for known families and for others."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dagrl.backends.sglang.versions import TESTED
from dagrl.cli import main
from dagrl.doctor import libraries, model

SIZES = {
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "torch_dtype": "bfloat16",
    "rope_theta": 1e6,
}
EXPERTS = {"num_experts_per_tok": 8, "norm_topk_prob": True, "n_routed_experts": 256, "moe_intermediate_size": 2048}
LATENT = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "q_lora_rank": 1536}
INDEXED = {
    **EXPERTS,
    **LATENT,
    "index_head_dim": 128,
    "index_n_heads": 64,
    "index_topk": 2048,
    "topk_method": "noaux_tc",
}
WINDOWS = ["sliding_attention", "full_attention"] * 2
YARN = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096}
DESCRIBE = "next: describe the family"

CASES = {
    "llama": ({"pretraining_tp": 1, "mlp_bias": False}, ["built by dagrl (dagrl.backends.families.llama)", "tables"]),
    "qwen3": ({"head_dim": 128}, ["10 of 10 are fields of transformers' Qwen3Config", "next: `dagrl plan grpo"]),
    "qwen3_moe": (
        {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True},
        ["13 of 13 are fields of transformers' Qwen3MoeConfig", "built by dagrl", "next: `dagrl plan grpo"],
    ),
    "glm4_moe": (
        {**EXPERTS, "n_shared_experts": 1, "first_k_dense_replace": 1, "partial_rotary_factor": 0.5},
        ["(GLM45Bridge)", "converted by tables of dagrl", "next: `dagrl plan grpo"],
    ),
    "deepseek_v3": (
        {**EXPERTS, **LATENT, "topk_method": "noaux_tc", "quantization_config": {"quant_method": "fp8"}},
        [
            "`num_key_value_heads`: not read by the Megatron engine",
            "quantised (quantization_config, fp8)",
            "next: the checks say why",
        ],
    ),
    "hy_v3": (
        {**EXPERTS, "num_experts": 192},
        ["(HYV3Bridge)", "refused  check", "megatron-bridge does not read its config"],
    ),
    "qwen3_5_text": (
        {"linear_num_key_heads": 16, "attn_output_gate": True, "layer_types": ["linear_attention"] * 4},
        ["families.qwen3_5_text", "`attn_output_gate`: ignored by transformers"],
    ),
    "gpt_oss": (
        {
            "attention_bias": True,
            "num_local_experts": 32,
            "num_experts_per_tok": 4,
            "layer_types": WINDOWS,
            "rope_scaling": YARN,
            "quantization_config": {"quant_method": "mxfp4"},
        },
        ["(GPTOSSBridge)", "refused  check", "quantised (quantization_config, mxfp4)"],
    ),
    "deepseek_v32": (
        INDEXED,
        ["refused  model", "deepseek_v3 does not know `index_head_dim`, `index_n_heads` and `index_topk`", DESCRIBE],
    ),
    "glm_moe_dsa": (INDEXED, ["(GLM5Bridge)", "refused  check", "sparse attention does not take packed sequences"]),
    "gemma4_text": (
        {"layer_types": WINDOWS, "hidden_activation": "gelu_pytorch_tanh"},
        ["(Gemma4Bridge)", "refused  check", "megatron-bridge has no names for some of its weights"],
    ),
    "minimax_m2": (
        {"num_local_experts": 256, "num_experts_per_tok": 8, "rotary_dim": 64, "use_mtp": True},
        [
            "(MiniMaxM2Bridge)",
            "converted by megatron-bridge",
            "`use_mtp`: ignored by transformers",
            "next: `dagrl plan",
        ],
    ),
    "granite": (
        {"embedding_multiplier": 12.0, "logits_scaling": 8.0, "mlp_bias": False},
        ["refused  model", "llama does not know `embedding_multiplier` and `logits_scaling`", DESCRIBE],
    ),
    "nemotron_h": ({}, ["has NemotronHBridge, which dagrl cannot use: it builds a HybridModel", DESCRIBE]),
    "kimi_k2": (
        {**EXPERTS, **LATENT, "architectures": ["DeepseekV3ForCausalLM"], "topk_method": "noaux_tc", "ep_size": 8},
        ["DeepSeekV3Bridge, which dagrl cannot use: transformers lacks kimi_k2", "deepseek_v3 does not know `ep_size`"],
    ),
    "starfish": (
        {"architectures": ["StarfishForCausalLM"], "arms": 5},
        ["no config class for starfish", " does not know `arms`", "does not know the model type starfish"],
    ),
}
"""Model type -> fields of its config beside the usual sizes, and texts of the report."""


@pytest.fixture
def report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Write a config.json, and return the exit code and the report."""
    monkeypatch.setattr(model, "list_gpus", list)
    monkeypatch.setattr(libraries, "made_environments", dict)

    def run(config: object, *options: str) -> tuple[int, str]:
        (tmp_path / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
        code = main(["doctor", "model", str(tmp_path), *options])
        told = capsys.readouterr()
        return code, told.out + told.err

    return run


@pytest.mark.parametrize("model_type", CASES)
def test_models(report, model_type: str) -> None:
    fields, texts = CASES[model_type]
    code, told = report({"model_type": model_type, **SIZES, **fields})
    for text in texts:
        assert text in told
    assert code == ("refused" in told)
    assert len(told.splitlines()) < 24


def test_a_field_that_does_not_reach_megatron(report) -> None:
    config = {"model_type": "llama", **SIZES, "pretraining_tp": 4, "use_cache": False, "initializer_range": 0.1}
    assert "ignored in training    `pretraining_tp`: not read by the Megatron engine" in report(config)[1]


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("hidden_size", "big", "wrong value of `hidden_size`: expected a whole number"),
        ("use_sliding_window", True, "the megatron engine has no qwen3 with use_sliding_window true"),
        ("vocab_size", None, "vocab_size"),
        ("rope_scaling", {"rope_type": "longrope"}, "no rope scaling of type 'longrope'"),
    ],
)
def test_values_that_are_refused(report, field: str, value: object, text: str) -> None:
    code, told = report({"model_type": "qwen3", **SIZES, field: value})
    assert code == 1 and "refused  check" in told and text in told


@pytest.mark.parametrize("value", [None, "x", -1, [], {"a": 1}, [None]])
@pytest.mark.parametrize("field", ["n_group", "layer_types", "rope_scaling", "architectures", "num_experts_per_tok"])
@pytest.mark.parametrize("model_type", ["kimi_k2", "gemma2"])
def test_any_value_is_reported_on(report, model_type: str, field: str, value: object) -> None:
    architectures = ["DeepseekV3ForCausalLM"] if model_type == "kimi_k2" else ["Gemma2ForCausalLM"]
    config = {"model_type": model_type, **SIZES, **EXPERTS, **LATENT, "architectures": architectures, field: value}
    assert "next: " in report(config)[1]


@pytest.mark.parametrize(
    ("text", "message"),
    [('{"model_type": [', "is not a JSON object"), ('{"hidden_size": 8}', "names no architecture (model_type)")],
)
def test_a_broken_config(report, text: str, message: str) -> None:
    code, told = report(text)
    assert code == 2 and told.startswith("dagrl doctor model: ") and message in told and told.count("\n") == 1


@pytest.mark.parametrize(
    ("path", "message"),
    [("a/b/c", "does not exist"), ("No/Such", "there is no folder `No/Such`"), (".", "config.json")],
)
def test_no_folder(path: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    assert main(["doctor", "model", path]) == 2
    assert message in capsys.readouterr().err


def test_a_name_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3", **SIZES}))
    monkeypatch.setattr(model, "locate", lambda named: (tmp_path, str(named)))
    assert main(["doctor", "model", "Qwen/Qwen9-1B@main"]) == 0
    assert "next: `dagrl plan grpo model.path=Qwen/Qwen9-1B@main`" in capsys.readouterr().out


def test_json(report) -> None:
    code, told = report({"model_type": "granite", **SIZES}, "--json")
    found = json.loads(told)
    assert code == 1 and found["trains"] is False and found["next"].startswith("describe the family")
    refusals = [each for each in found["findings"] if each["verdict"] == "refused"]
    assert [(each["section"], each["name"]) for each in refusals] == [("training", "model")]


def test_libraries_of_other_environments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(file: str, text: str = "") -> None:
        path = tmp_path / "lib/python3.12/site-packages" / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    for name, version in (("transformers", "9.0.0"), ("sglang", "0.9.0"), ("vllm", "0.26.0+cu130")):
        write(f"{name}-{version}.dist-info/METADATA", f"Name: {name}\nVersion: {version}\n")
    write("transformers/models/auto/auto_mappings.py", 'CONFIG_MAPPING_NAMES = [\n    ("star", "StarConfig"),\n]')
    write("sglang/srt/models/star.py", "EntryClass = [\n    StarForCausalLM,\n    MoonForCausalLM,\n]")
    write(
        "vllm/model_executor/models/registry.py",
        '_TEXT_GENERATION_MODELS = {\n    "StarForCausalLM": ("star", "Star"),\n}\n'
        '_PREVIOUSLY_SUPPORTED_MODELS = {\n    "MoonForCausalLM": "0.9",\n}\n',
    )
    monkeypatch.setattr(libraries, "made_environments", lambda: {"new": tmp_path})

    def told(model_type: str, architecture: str) -> dict[str, str]:
        found = libraries.libraries(model_type, [architecture], on_gpus=False)
        return {each.name: f"{each.verdict.value}: {each.text}" for each in found if "`new`" in each.text}

    untested = TESTED.problem(tmp_path, on_gpus=False)
    where = ", in the environment `new`"
    assert untested is not None
    assert told("star", "StarForCausalLM") == {
        "transformers 9.0.0": f"ok: knows the model type star{where}",
        "SGLang 0.9.0": f"hint: has StarForCausalLM{where}; {untested}",
        "vLLM 0.26.0+cu130": f"ok: has StarForCausalLM{where}",
    }
    moon = told("moon", "MoonForCausalLM")
    assert moon["transformers 9.0.0"] == f"hint: does not know the model type moon{where}"
    assert moon["vLLM 0.26.0+cu130"] == f"hint: does not implement MoonForCausalLM{where}"
