"""Qwen3-8B on a GPU of 24 GB, as docs/lora.md says: adapters sent alone, and weights offloaded."""

from __future__ import annotations

import pytest
from fitted_templates import fitted

NEEDED = (
    "engines.actor.lora.merge=false",
    "engines.actor.offload={param: true}",
    "engines.actor.transformer={recompute_granularity: full, recompute_method: uniform, recompute_num_layers: 1}",
    "engines.actor.fused_linear_cross_entropy=true",
)
GIVEN = (
    "model.path=Qwen/Qwen3-8B",
    "data.max_prompt_tokens=512",
    "nodes.rollout.sampling.max_new_tokens=1536",
    "nodes.old.tokens_per_micro_batch=2048",
    "nodes.update.tokens_per_micro_batch=2048",
    "engines.generator={backend: vllm, group: devices, weights_from: actor, server: {gpu_memory_utilization: 0.96}}",
)


def test_it_fits() -> None:
    assert fitted("qwen3_8b_lora", "L4", *GIVEN, *NEEDED).problems == ()


@pytest.mark.parametrize("left_out", [0, 1, 2, 3], ids=["merge", "offload", "recomputation", "fused cross entropy"])
def test_it_needs_each_of_them(left_out: int) -> None:
    assert fitted("qwen3_8b_lora", "L4", *GIVEN, *NEEDED[:left_out], *NEEDED[left_out + 1 :]).problems
