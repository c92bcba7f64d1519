"""Parallel layouts that the tests compare with one process: name -> ranks and sizes."""

from typing import Any

from gpu_cases import PARALLEL

DENSE = {
    "dp2": (2, {}),
    "tp2": (2, {"tp": 2}),
    "tp2-sp": (2, {"tp": 2, "sp": True}),
    "pp2": (2, {"pp": 2}),
    "pp2-vpp2": (2, {"pp": 2, "vpp": 2}),
    "pp4": (4, {"pp": 4}),
    "cp2": (2, {"cp": 2}),
    "cp4": (4, {"cp": 4}),
    "tp2-pp2": (4, {"tp": 2, "pp": 2, "sp": True}),
    "tp2-pp2-vpp2": (4, {"tp": 2, "pp": 2, "vpp": 2, "sp": True}),
    "cp2-tp2": (4, {"tp": 2, "cp": 2, "sp": True}),
    "cp2-pp2-vpp2": (4, {"cp": 2, "pp": 2, "vpp": 2}),
    "dp2-pp2": (4, {"pp": 2}),
    "tp2-pp2-cp2": (8, {"tp": 2, "pp": 2, "cp": 2, "sp": True}),
}
LATENT = {
    "ep2": (2, {"ep": 2}),
    "pp2": (2, {"pp": 2}),
    "tp2-ep2": (2, {"tp": 2, "sp": True, "ep": 2}),
    "cp2-ep2": (2, {"cp": 2, "ep": 2}),
    "tp2-pp2-vpp2-ep2": (4, {"tp": 2, "pp": 2, "vpp": 2, "sp": True, "ep": 2}),
}
SHARED_KEYS = {
    "tp4": (4, {"tp": 4}),
    "tp4-sp": (4, {"tp": 4, "sp": True}),
    "tp4-cp2": (8, {"tp": 4, "cp": 2, "sp": True}),
}
MIXTURE = {
    "dp2": (2, {}),
    "ep2": (2, {"ep": 2}),
    "ep2-tp2": (2, {"ep": 2, "tp": 2, "sp": True}),
    "etp2-tp2": (2, {"tp": 2, "etp": 2, "sp": True}),
    "tp2": (2, {"tp": 2, "sp": True}),
    "cp2-ep2": (2, {"cp": 2, "ep": 2}),
    "ep2-pp2": (4, {"ep": 2, "pp": 2}),
    "ep4": (4, {"ep": 4}),
    "ep2-tp2-pp2": (4, {"ep": 2, "tp": 2, "pp": 2, "sp": True}),
    "tp2-cp2-ep4": (4, {"tp": 2, "cp": 2, "ep": 4, "sp": True}),
}

LATENT_SHAPE = {
    "q_lora_rank": 16,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "first_k_dense_replace": 1,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "moe_intermediate_size": 24,
    "routed_scaling_factor": 2.5,
}
"""Fields of a small DeepSeek-V3 beside those of all families."""


def parallel_of(layout: dict[str, Any]) -> dict[str, Any]:
    return {PARALLEL[name]: value for name, value in layout.items()}
