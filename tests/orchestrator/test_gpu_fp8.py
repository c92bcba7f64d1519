"""Rollouts and training in fp8 on a GPU: weights arrive to the bit, and log-probs stay near those of bfloat16."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dagrl.backends.environments import made_environments
from dagrl.config.fp8_weights import Granularity

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(600)]

STEPS = 3
LARGEST_DIFFERENCE = 0.1
"""Mean difference of log-probs; about 0.01 in bfloat16."""
FP8 = {"quantization": "fp8"}
CACHE = {**FP8, "server": {"kv_cache_dtype": "fp8_e4m3"}}
BY_CHANNEL = {"quantization": "fp8_per_channel", "server": {"kv_cache_dtype": "fp8_e4m3"}}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "SGLang": ("sglang", FP8, {}),
    "SGLang with its cache": ("sglang", CACHE, {}),
    "SGLang, a layer in bfloat16": ("sglang", {**FP8, "modules_to_not_convert": ["model.layers.0"]}, {}),
    "vLLM": ("vllm", FP8, {}),
    "vLLM with its cache": ("vllm", CACHE, {}),
    "SGLang, by channel": ("sglang", BY_CHANNEL, {}),
    "vLLM, by channel": ("vllm", BY_CHANNEL, {}),
    "training, blockwise": ("sglang", {}, {"fp8": "hybrid"}),
    "training, tensorwise": ("sglang", {}, {"fp8": "hybrid", "fp8_recipe": "tensorwise"}),
    "training, delayed": ("sglang", {}, {"fp8": "hybrid", "fp8_recipe": "delayed"}),
    "all": ("sglang", CACHE, {"fp8": "e4m3"}),
}
"""Backend, further keys of its section, and the trainer's ``transformer`` section."""
POLICIES = [
    pytest.param(name, experts, id=f"{name}-{'mixture' if experts else 'dense'}")
    for experts in (False, True)
    for name, (_, generator, _) in CASES.items()
    # Mixtures have no scales of channels.
    if not (experts and generator is BY_CHANNEL)
]
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "norm_topk_prob": True}
SIZES = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 128, "num_attention_heads": 4}


@pytest.mark.parametrize(("name", "experts"), POLICIES)
def test_policies_agree(lab, benchmark_module, tmp_path: Path, name: str, experts: bool) -> None:
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs a GPU with fp8")
    backend, generator, transformer = CASES[name]
    if backend == "vllm" and "vllm" not in made_environments():
        pytest.skip("needs the environment that `make vllm` makes")
    pipeline = lab.tiny_pipeline()
    init = pipeline["model"]["init"]
    init |= SIZES | {"num_key_value_heads": 2}
    if experts:
        init |= EXPERTS | {"model_type": "qwen3_moe"}
    pipeline["groups"] = {"gpu": {"gpus_per_node": 1}}
    engines = pipeline["engines"]
    engines["actor"] |= {"group": "gpu", "transformer": transformer}
    engines["generator"] = {
        "backend": backend,
        "group": "gpu",
        "weights_from": "actor",
        # Everything is sent twice and compared.
        "weight_sync": {"checksum": True},
        "sleep": True,
        **({"environment": "vllm"} if backend == "vllm" else {}),
        **generator,
        "server": benchmark_module("learning").SERVERS[backend] | generator.get("server", {}),
    }
    # The first start on a machine compiles DeepGEMM's kernels.
    pipeline["run"] |= {"steps": STEPS, "start_timeout_s": 400}
    run = lab.start(lab.write_pipeline(tmp_path, pipeline), tmp_path / "run")
    assert run.wait(500.0) == 0, run.output
    metrics = run.metrics()
    assert [line["policy_version"] for line in metrics] == list(range(1, STEPS + 1))
    for line in metrics:
        assert line["mismatch/logprob_diff/mean"] <= LARGEST_DIFFERENCE
        assert line["grad_norm"] > 0 or not line["reward/std"]


@pytest.mark.parametrize("granularity", ["block", "channel"])
@pytest.mark.parametrize("shape", [(2, 384, 512), (130, 300)])
def test_a_gpu_quantises_to_the_bits_of_a_cpu(shape: tuple[int, ...], granularity: Granularity) -> None:
    from dagrl.weight_sync.fp8 import quantise

    weights = torch.randn(shape).bfloat16()
    for here, there in zip(quantise(weights, granularity), quantise(weights.cuda(), granularity), strict=True):
        assert torch.equal(here.view(torch.uint8), there.cpu().view(torch.uint8))
