"""Megatron's own models of experts and latent attention: in every layout the loss and gradients of one process."""

import zlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="with CUDA the modules are Transformer Engine's")

VOCABULARY, TOKENS_WITH_LOSS = 64, 0.8
PACKS = ((8, 24, 16), (16, 8, 24), (40,), (8, 8, 16, 8))
"""Lengths of sequences, of four micro-batches: two ranks get as many tokens each, four do not."""

COMMON = {
    "num_layers": 4,
    "hidden_size": 32,
    "ffn_hidden_size": 48,
    "num_attention_heads": 4,
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 24,
    "moe_router_load_balancing_type": "none",
    "moe_token_dispatcher_type": "alltoall",
    "moe_grouped_gemm": True,
    "normalization": "RMSNorm",
    "gated_linear_unit": True,
    "activation_func": torch.nn.functional.silu,
    "add_bias_linear": False,
    "bias_activation_fusion": False,
    "bias_dropout_fusion": False,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "gradient_accumulation_fusion": False,
    "apply_rope_fusion": False,
    "calculate_per_token_loss": True,
    "perform_initialization": False,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_query_groups": 2, "kv_channels": 12, "qk_layernorm": True},
    "mixtral": {"num_query_groups": 2, "moe_ffn_hidden_size": 48, "moe_grouped_gemm": False},
    "deepseek_v3": {
        "multi_latent_attention": True,
        "q_lora_rank": 24,
        "kv_lora_rank": 16,
        "qk_head_dim": 8,
        "qk_pos_emb_head_dim": 4,
        "v_head_dim": 6,
        "rope_type": "yarn",
        "qk_layernorm": True,
        "moe_layer_freq": [0, 1, 1, 1],
        "moe_shared_expert_intermediate_size": 24,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_num_groups": 2,
        "moe_router_group_topk": 1,
        "moe_router_topk_scaling_factor": 2.5,
        "moe_router_dtype": "fp32",
    },
}


@dataclass(frozen=True)
class Layout:
    """Ranks, and what else may differ from one process without a difference in numbers."""

    world: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1
    vpp: int | None = None
    fields: dict[str, Any] = field(default_factory=dict)
    ddp: dict[str, Any] = field(default_factory=dict)

    @property
    def dp(self) -> int:
        return self.world // (self.tp * self.pp * self.cp)


def config_of(family: str, layout: Layout) -> Any:
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    values = {**COMMON, **FAMILIES[family], **layout.fields}
    values |= {"tensor_model_parallel_size": layout.tp, "sequence_parallel": layout.tp > 1}
    values |= {"context_parallel_size": layout.cp, "expert_model_parallel_size": layout.ep}
    values |= {"expert_tensor_parallel_size": layout.etp, "pipeline_model_parallel_size": layout.pp}
    values |= {"pipeline_dtype": torch.float32, "virtual_pipeline_model_parallel_size": layout.vpp}
    if layout.pp > 1:
        values |= {"variable_seq_lengths": True, "overlap_p2p_comm": layout.vpp is not None, "batch_p2p_comm": False}
    return (MLATransformerConfig if values.get("multi_latent_attention") else TransformerConfig)(**values)


def build(family: str, layout: Layout) -> list[Any]:
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    from dagrl.backends.megatron.engine.cpu.modules import use_plain_modules

    use_plain_modules()
    parallel_state.initialize_model_parallel(
        layout.tp,
        layout.pp,
        layout.vpp,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
    )
    model_parallel_cuda_manual_seed(1)
    config = config_of(family, layout)
    config.finalize_model_grads_func = finalize_model_grads
    chunks = []
    for stage in range(layout.vpp or 1):
        vp_stage = stage if layout.vpp else None
        chunk = GPTModel(
            config=config,
            transformer_layer_spec=get_gpt_decoder_block_spec(config, use_transformer_engine=True, vp_stage=vp_stage),
            vocab_size=VOCABULARY,
            max_sequence_length=64,
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
            share_embeddings_and_output_weights=False,
            position_embedding_type="rope",
            vp_stage=vp_stage,
        )
        chunks.append(DistributedDataParallel(config, DistributedDataParallelConfig(**layout.ddp), chunk))
    return chunks


def shards(chunk: Any) -> list[Any]:
    """Every part of a tensor that the chunk holds, as megatron describes it for checkpoints."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories

    described = chunk.module.sharded_state_dict()
    apply_factories(described)
    return [value for value in nested_values(described) if isinstance(value, ShardedTensor)]


def fill(chunk: Any) -> None:
    """Random weights that follow from a tensor's name alone."""
    for shard in shards(chunk):
        generator = torch.Generator().manual_seed(zlib.crc32(shard.key.encode()))
        whole = 0.1 * torch.randn(shard.global_shape, generator=generator)
        mean = 1.0 if shard.data.dim() == 1 else 0.0
        shard.data.detach().copy_((whole + mean)[shard.global_slice()])


def micro_batches(layout: Layout, dp_rank: int) -> list[dict[str, Any]]:
    random = np.random.default_rng(3)
    packs = []
    for lengths in PACKS:
        total = sum(lengths)
        tokens = random.integers(0, VOCABULARY, (2, total))
        weights = random.random(total) < TOKENS_WITH_LOSS
        position = np.concatenate([np.arange(length) for length in lengths])
        packs.append({"lengths": np.array(lengths), "tokens": tokens, "weights": weights, "position": position})
    return packs[dp_rank :: layout.dp]


def forward_step(batches: Any, chunk: Any) -> tuple[Any, Callable[..., Any]]:
    from megatron.core import parallel_state
    from megatron.core.packed_seq_params import PackedSeqParams

    from dagrl.backends.megatron.engine.context_parallel import zigzag_index

    batch = next(batches)
    rank, size = parallel_state.get_context_parallel_rank(), parallel_state.get_context_parallel_world_size()
    held = zigzag_index(batch["lengths"], rank, size)
    tokens, labels, position = (
        torch.from_numpy(values[held])[None] for values in (*batch["tokens"], batch["position"])
    )
    weights = torch.from_numpy(batch["weights"][held])
    bounds = torch.from_numpy(np.concatenate([[0], batch["lengths"].cumsum()])).int()
    longest = int(batch["lengths"].max())
    params = PackedSeqParams("thd", bounds, bounds, bounds, bounds, max_seqlen_q=longest, max_seqlen_kv=longest)
    output = chunk(tokens, position, None, labels=labels, packed_seq_params=params)

    def loss_of(losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
        loss, count = (losses[0] * weights).sum(), weights.sum()
        return loss, count.int(), {"loss": torch.stack([loss.detach(), count])}

    return output, loss_of


def step(rank: int, family: str, layout: Layout) -> dict[str, Any]:
    """Loss, and every gradient that the rank holds: of which tensor, where in it, and its values."""
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import get_forward_backward_func

    chunks = build(family, layout)
    for chunk in chunks:
        chunk.train()
        fill(chunk)
        chunk.zero_grad_buffer()
    batches = micro_batches(layout, parallel_state.get_data_parallel_rank())
    length = max(len(batch["position"]) for batch in batches)
    found = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=[iter(batches) for _ in chunks],
        model=chunks,
        num_microbatches=len(batches),
        seq_length=length,
        micro_batch_size=1,
        decoder_seq_length=length,
        forward_only=False,
    )
    total = sum((entry["loss"] for entry in found), torch.zeros(2))
    torch.distributed.all_reduce(total)
    pieces = []
    for chunk in chunks:
        for parameter in chunk.parameters():
            parameter.data.copy_(parameter.main_grad)
        pieces += [
            (shard.key, tuple(shard.global_shape), shard.global_slice(), shard.data.detach().numpy().copy())
            for shard in shards(chunk)
        ]
    return {"loss": (total[0] / total[1]).item(), "pieces": pieces}


@pytest.fixture(scope="module")
def one_process(run_ranks: Callable[..., list[Any]]) -> Callable[[str], dict[str, Any]]:
    """Loss and whole gradients of a family, from one process; worked out once."""
    known: dict[str, dict[str, Any]] = {}

    def reference(family: str) -> dict[str, Any]:
        if family not in known:
            (result,) = run_ranks(1, step, family, Layout())
            whole = {key: np.full(shape, np.nan, np.float32) for key, shape, _, _ in result["pieces"]}
            for key, _, place, values in result["pieces"]:
                whole[key][place] = values
            assert not any(np.isnan(values).any() for values in whole.values())
            known[family] = {"loss": result["loss"], "whole": whole}
        return known[family]

    return reference


def compare(reference: dict[str, Any], ranks: list[dict[str, Any]]) -> None:
    seen = {key: np.zeros(values.shape, bool) for key, values in reference["whole"].items()}
    errors: dict[str, float] = {}
    for result in ranks:
        assert result["loss"] == pytest.approx(reference["loss"], rel=1e-6)
        for key, shape, place, values in result["pieces"]:
            whole = reference["whole"][key]
            assert whole.shape == shape
            seen[key][place] = True
            error = float(np.abs(values - whole[place]).max() / np.abs(whole).max())
            errors[key] = max(errors.get(key, 0.0), error)
    assert all(part.all() for part in seen.values())
    assert not {key: error for key, error in errors.items() if not error <= 1e-5}


ALLGATHER = {"moe_token_dispatcher_type": "allgather"}
LAYOUTS = {
    "ep2": Layout(2, ep=2),
    "ep2_allgather": Layout(2, ep=2, fields=ALLGATHER),
    "tp2_ep2": Layout(2, tp=2, ep=2),
    "cp2_ep2": Layout(2, cp=2, ep=2),
    "cp2_tp2_ep4": Layout(4, cp=2, tp=2, ep=4),
    "tp2_ep2_etp2": Layout(4, tp=2, ep=2, etp=2),
    "pp2_vpp2": Layout(2, pp=2, vpp=2),
}
MORE_LAYOUTS = {
    "dp2": Layout(2),
    "ep4": Layout(4, ep=4),
    "ep2_sequential": Layout(2, ep=2, fields={"moe_grouped_gemm": False}),
    "ep2_shared_experts_overlap": Layout(2, ep=2, fields={"moe_shared_expert_overlap": True}),
    "ep2_grad_reduce_overlap": Layout(4, ep=2, ddp={"overlap_grad_reduce": True, "bucket_size": 2000}),
    "tp2_ep2_allgather": Layout(2, tp=2, ep=2, fields=ALLGATHER),
    "tp2_ep2_dp2": Layout(4, tp=2, ep=2),
    "tp2_etp2_allgather": Layout(2, tp=2, etp=2, fields=ALLGATHER),
    "cp4": Layout(4, cp=4),
    "pp2_ep2": Layout(4, pp=2, ep=2),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_gradients_are_those_of_one_process(run_ranks, one_process, family, layout):
    compare(one_process(family), run_ranks(layout.world, step, family, layout))


@pytest.mark.parametrize("layout", MORE_LAYOUTS.values(), ids=MORE_LAYOUTS)
def test_further_layouts_of_the_family_that_has_everything(run_ranks, one_process, layout):
    compare(one_process("deepseek_v3"), run_ranks(layout.world, step, "deepseek_v3", layout))


SELECTIVE = ["core_attn", "moe_act", "layernorm", "mlp", "shared_experts", "mla_up_proj"]
RECOMPUTE = {
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    "selective": {"recompute_granularity": "selective", "recompute_modules": SELECTIVE},
    "experts": {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
    "experts_by_the_old_name": {"recompute_granularity": "selective", "moe_layer_recompute": True},
}


@pytest.mark.parametrize("fields", RECOMPUTE.values(), ids=RECOMPUTE)
@pytest.mark.parametrize("layout", [Layout(), Layout(4, tp=2, cp=2, ep=2, etp=2)], ids=["alone", "tp2_cp2_ep2_etp2"])
def test_recomputing_gives_the_same_gradients(run_ranks, one_process, fields, layout):
    layout = replace(layout, fields=fields)
    compare(one_process("deepseek_v3"), run_ranks(layout.world, step, "deepseek_v3", layout))


def test_parameters_are_those_of_transformer_engine(run_ranks):
    """Names of a layer of experts with latent attention, as bridges and checkpoints from GPUs know them."""

    def names(rank: int) -> tuple[set[str], set[str]]:
        (chunk,) = build("deepseek_v3", Layout())
        inner = "decoder.layers.1."
        held = {name.removeprefix(inner) for name, _ in chunk.module.named_parameters() if name.startswith(inner)}
        classes = {type(module).__name__ for module in chunk.module.modules()}
        return held, classes

    ((held, classes),) = run_ranks(1, names)
    attention = {"linear_q_down_proj.weight", "linear_kv_down_proj.weight", "linear_proj.weight"}
    for up in ("linear_q_up_proj", "linear_kv_up_proj"):
        attention |= {f"{up}.weight", f"{up}.layer_norm_weight"}
    experts = {f"experts.{linear}.weight{expert}" for linear in ("linear_fc1", "linear_fc2") for expert in range(4)}
    shared = {"shared_experts.linear_fc1.weight", "shared_experts.linear_fc2.weight"}
    assert held == {
        *("input_layernorm.weight", "pre_mlp_layernorm.weight", "mlp.router.weight"),
        *(f"self_attention.{name}" for name in attention),
        *(f"mlp.{name}" for name in experts | shared),
    }
    assert classes >= {"TELinear", "TELayerNormColumnParallelLinear", "TENorm"}
    assert classes >= {"TEColumnParallelGroupedLinear", "TERowParallelGroupedLinear"}
