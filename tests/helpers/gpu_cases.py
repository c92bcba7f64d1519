"""Which layouts are compared with one GPU, on which models; `gpu_layouts` runs them, `test_gpu_layouts` judges."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from dagrl.config.schema import ModelSpec
    from dagrl.data.batch import Batch

VOCABULARY = 1003
BUDGET = 1024
"""Tokens of a micro-batch: several to a batch, and several rows to each."""
SEED = 3

COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "initializer_range": 0.06,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "pad_token_id": None,
}
MODELS: dict[str, dict[str, Any]] = {
    "dense": {"model_type": "qwen3", "head_dim": 64, "intermediate_size": 512},
    "tied": {"model_type": "qwen3", "head_dim": 64, "intermediate_size": 512, "tie_word_embeddings": True},
    "mixture": {
        "model_type": "qwen3_moe",
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 512,
        "moe_intermediate_size": 128,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
    },
    "latent": {
        "model_type": "deepseek_v3",
        "num_key_value_heads": 8,
        "intermediate_size": 512,
        "q_lora_rank": 96,
        "kv_lora_rank": 64,
        # DeepSeek's own sizes of heads: those that the fused kernels are made for.
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 128,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "routed_scaling_factor": 2.5,
        "norm_topk_prob": True,
    },
}
"""Four layers each: up to four pipeline stages."""
MODELS["routed"] = MODELS["mixture"]
"""The same, but tokens go to experts that were drawn by lot: one GPU and any layout send each to the same."""
MODELS["scorer"] = MODELS["dense"]
"""The same as a reward model, that is trained."""
EXPERTS = {"moe_grouped_gemm": True, "moe_token_dispatcher_type": "alltoall"}
RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
OVERLAP = {"ddp": {"overlap_grad_reduce": True, "overlap_param_gather": True}}
BUCKETS = {"ddp": OVERLAP["ddp"] | {"bucket_size": 200_000}}
"""The output layer has a bucket of its own, as in any model of size."""

PARALLEL = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "vpp": "virtual_pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
    "sp": "sequence_parallel",
}


@dataclass(frozen=True)
class Case:
    """A model in a layout, and what is compared: with one GPU (``layout``), or after a resume in another layout."""

    model: str
    layout: dict[str, Any] = field(default_factory=dict)
    fields: dict[str, Any] = field(default_factory=dict)
    """Further fields of the engine."""
    kind: str = "layout"
    """``layout``; ``resume``; ``hugging-face``: log-probs of the exported folder; ``zigzag``: places of tokens."""
    resumes_as: dict[str, Any] = field(default_factory=dict)
    """The layout that a ``resume`` goes on in."""
    idle: bool = False
    """All rows are the first replica's; the others run the model on nothing."""
    tag: str = ""

    @property
    def name(self) -> str:
        """Says it all, in a word."""
        shown = [] if self.kind in ("layout", "resume") else [self.kind]
        after = ["to", *_words(self.resumes_as)] if self.kind == "resume" else []
        tags = [*(["idle"] if self.idle else []), *([self.tag] if self.tag else [])]
        return "-".join([self.model, *shown, *_words(self.layout), *after, *tags])

    def precisions(self, on_gpu: bool) -> tuple[str, ...]:
        """On a GPU, Transformer Engine splits sequences over ranks in bfloat16 only; on the CPU all is float32."""
        if self.kind == "zigzag":
            return ("fp32",) if on_gpu else ()
        if not on_gpu or self.kind != "layout":
            return ("fp32",)
        return ("bf16",) if "cp" in self.layout else ("fp32", "bf16")


def _words(layout: dict[str, Any]) -> list[str]:
    return [name if value is True else f"{name}{value}" for name, value in layout.items()] or ["dp"]


def spec_fields(case: Case, layout: dict[str, Any], precision: str) -> dict[str, Any]:
    """Fields of MegatronEngineSpec."""
    transformer = {"bf16": precision == "bf16", **({} if case.model in ("dense", "tied", "scorer") else EXPERTS)}
    return {
        "backend": "megatron",
        "group": "train",
        "parallel": {PARALLEL[name]: value for name, value in layout.items()},
        # A large epsilon: with Adam's own, a gradient of nearly 0 gives a step of full size and of chance direction.
        "optimizer": {"lr": 1e-2, "adam_eps": 1e-2},
        "router_replay": case.model == "routed",
        "head": "reward" if case.model == "scorer" else "lm",
        **case.fields,
        "transformer": {**transformer, **case.fields.get("transformer", {})},
    }


def model_spec(model: str) -> "ModelSpec":
    """Random weights of one of `MODELS`."""
    from dagrl.config.schema import ModelSpec

    return ModelSpec.model_validate({"init": COMMON | MODELS[model], "tokenizer": {"kind": "bytes"}})


def rows(count: int) -> "Batch":
    """At least 8 rows of 2 to 320 tokens, four to a prompt; one response is masked, one is a single token.

    Routes are drawn by lot.
    """
    from dagrl.data.batch import Batch, Column

    random = np.random.default_rng(5)
    prompts, responses = random.integers(1, 64, -(-count // 4)).repeat(4)[:count], random.integers(1, 256, count)
    shared = [random.integers(0, VOCABULARY, n) for n in prompts[::4]]
    responses[4] = 1
    masks = [np.ones(n) for n in responses]
    masks[7][:] = 0
    lots = [random.random((n, COMMON["num_hidden_layers"], 8)).argsort(-1)[..., :2] for n in prompts + responses - 1]
    return Batch(
        np.arange(100, 100 + count),
        {
            "prompt_tokens": Column.ragged([shared[row // 4] for row in range(count)], "int64"),
            "response_tokens": Column.ragged([random.integers(0, VOCABULARY, n) for n in responses], "int64"),
            "response_mask": Column.ragged(masks, "float32"),
            "advantage": Column.ragged([random.normal(size=n) for n in responses], "float32"),
            "reward": Column(random.normal(size=count).astype("float32")),
            "routed_experts": Column.ragged(lots, "int16"),
        },
    )


def _dense(*layouts: dict[str, Any]) -> list[Case]:
    return [Case("dense", layout) for layout in layouts]


def _mixture(*layouts: dict[str, Any]) -> list[Case]:
    return [Case("mixture", layout) for layout in layouts]


def _routed(*layouts: dict[str, Any]) -> list[Case]:
    return [Case("routed", layout) for layout in layouts]


def _latent(*layouts: dict[str, Any]) -> list[Case]:
    return [Case("latent", layout) for layout in layouts]


FUSED = {"fused_linear_cross_entropy": True}
SHARING = {"prefix_sharing": True}

CASES: dict[int, list[Case]] = {
    1: [
        Case("dense", kind="zigzag"),
        *(Case(model, kind="hugging-face") for model in MODELS if model not in ("routed", "scorer")),
        Case("dense", fields=FUSED, tag="fused"),
        Case("tied", fields=FUSED, tag="fused"),
        Case("dense", fields={"transformer": RECOMPUTE}, tag="recompute"),
        Case("mixture", fields={"transformer": RECOMPUTE}, tag="recompute"),
        *(Case(model, fields=SHARING, tag="sharing") for model in ("dense", "mixture", "latent")),
        Case("latent", fields={**SHARING, "transformer": RECOMPUTE}, tag="sharing-recompute"),
    ],
    2: [
        *_dense({}, {"tp": 2}, {"tp": 2, "sp": True}, {"pp": 2}, {"pp": 2, "vpp": 2}, {"cp": 2}),
        Case("dense", fields=OVERLAP, tag="overlap"),
        Case("dense", {"tp": 2, "sp": True}, FUSED, tag="fused"),
        Case("dense", {"pp": 2, "vpp": 2}, {"transformer": RECOMPUTE}, tag="recompute"),
        *(Case("dense", layout, SHARING, tag="sharing") for layout in ({"tp": 2, "sp": True}, {"pp": 2}, {"cp": 2})),
        Case("tied", {"pp": 2}),
        Case("tied", {"tp": 2, "sp": True}),
        *(Case("scorer", layout) for layout in ({"tp": 2}, {"tp": 2, "sp": True}, {"pp": 2}, {"cp": 2})),
        *(Case(model, idle=True, fields=OVERLAP) for model in ("dense", "scorer")),
        Case("mixture", {"ep": 2}, idle=True),
        *_mixture({"ep": 2}, {"tp": 2, "sp": True, "ep": 2}, {"cp": 2, "ep": 2}, {"tp": 2, "sp": True, "etp": 2}),
        *_routed({"tp": 2, "sp": True, "ep": 2}, {"cp": 2, "ep": 2}, {"pp": 2}),
        Case("routed", {"pp": 2}, {"transformer": RECOMPUTE}, tag="recompute"),
        *_latent({"ep": 2}, {"tp": 2, "sp": True, "ep": 2}, {"pp": 2}, {"cp": 2}),
        Case("dense", {"tp": 2, "sp": True}, kind="resume", resumes_as={"pp": 2}),
        Case("dense", kind="resume", resumes_as={"tp": 2, "sp": True}),
        Case("dense", fields=BUCKETS, kind="resume", resumes_as={"tp": 2, "sp": True}, tag="overlap"),
    ],
    4: [
        *_dense({"tp": 2, "sp": True, "pp": 2}, {"tp": 2, "sp": True, "cp": 2}, {"pp": 2, "cp": 2}),
        *_dense({}, {"tp": 2, "sp": True}, {"pp": 4}, {"cp": 4}),
        Case("tied", {"tp": 2, "sp": True, "pp": 2, "vpp": 2}),
        *_mixture({"ep": 4}, {"cp": 2, "ep": 2}, {"tp": 2, "sp": True, "ep": 4}, {"pp": 2, "ep": 2}),
        # The mixture has two key heads: with four ranks each is on two.
        *_mixture({"tp": 2, "sp": True, "etp": 2, "ep": 2}, {"tp": 4, "sp": True, "ep": 4}),
        *_routed({"tp": 2, "sp": True, "pp": 2, "vpp": 2, "ep": 2}),
        *_latent({"ep": 4}, {"tp": 2, "sp": True, "pp": 2, "ep": 2}),
        Case("dense", {"tp": 2, "sp": True, "pp": 2}, kind="resume", resumes_as={}),
        Case("mixture", {"ep": 2}, kind="resume", resumes_as={"tp": 2, "sp": True, "ep": 2}),
    ],
    8: [
        *_dense({"tp": 2, "sp": True, "pp": 2, "cp": 2}, {"tp": 2, "sp": True, "pp": 4}),
        *_mixture({"tp": 2, "sp": True, "cp": 2, "pp": 2, "ep": 4}, {"cp": 2, "ep": 8}),
        *_latent({"tp": 2, "sp": True, "pp": 2, "ep": 4}),
        Case("dense", {"tp": 2, "sp": True, "pp": 4}, kind="resume", resumes_as={"tp": 4, "sp": True}),
    ],
}
"""By number of GPUs. Data parallelism takes what a layout leaves."""
