"""Fields of Megatron's configs that a pipeline file may not set, or only to some values, and why.

dagrl trains on packed rows of any length, with a loss that is normalised before Megatron sees it, in a schedule of its
own. Some fields clash with that: Megatron would fail late, or compute something else without a word. Others follow from
what is said elsewhere. Held against Megatron-core 0.19.2, field by field.

The checks tell of them before a run; the engine asks again when it is built. Works on names and plain values only.
"""

from __future__ import annotations

from collections.abc import Iterator

from dagrl.backends.megatron.section import MegatronEngineSpec, ParallelSpec
from dagrl.config.unsupported import Clash

SECTIONS = ("transformer", "optimizer", "ddp")
"""Sections of an engine that hold Megatron's fields."""


def clashes_of(engine: MegatronEngineSpec) -> Iterator[tuple[str, str, str]]:
    """Section, field and reason of everything in an engine's sections that cannot stand there."""
    for section in SECTIONS:
        for field, value in getattr(engine, section).items():
            for clash in CLASHES[section]:
                if clash.hits(engine, field, value):
                    yield section, field, clash.reason
                    break


def fields_from_the_model() -> frozenset[str]:
    """TransformerConfig fields that only the model may say."""
    return frozenset(_FROM_MODEL.fields)


def _interleaved(engine: MegatronEngineSpec) -> bool:
    return engine.parallel.virtual_pipeline_model_parallel_size is not None


def _not_interleaved(engine: MegatronEngineSpec) -> bool:
    return not _interleaved(engine)


def _pipelined(engine: MegatronEngineSpec) -> bool:
    return engine.parallel.pipeline_model_parallel_size > 1


def _optimizer_not_distributed(engine: MegatronEngineSpec) -> bool:
    return engine.optimizer.get("use_distributed_optimizer") is False


_FROM_MODEL = Clash(
    (
        *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels"),
        *("normalization", "layernorm_epsilon", "layernorm_zero_centered_gamma", "qk_layernorm", "qk_l2_norm"),
        *("add_bias_linear", "add_qkv_bias", "gated_linear_unit", "activation_func", "glu_linear_offset"),
        *("activation_func_clamp_value", "apply_residual_connection_post_layernorm", "attention_output_gate"),
        *("rotary_interleaved", "no_rope_freq", "mrope_section", "softmax_scale", "softmax_type"),
        *("window_size", "window_attn_skip_freq", "experimental_attention_variant", "linear_attention_freq"),
        *("multi_latent_attention", "q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"),
        *("rope_type", "rotary_base", "rotary_percent", "rotary_scaling_factor", "original_max_position_embeddings"),
        *("beta_fast", "beta_slow", "mscale", "mscale_all_dim"),
        *("num_moe_experts", "moe_layer_freq", "moe_ffn_hidden_size", "moe_latent_size", "moe_router_topk"),
        *("moe_shared_expert_intermediate_size", "moe_shared_expert_gate", "moe_router_num_groups"),
        *("moe_router_group_topk", "moe_router_topk_limited_devices", "moe_router_pre_softmax"),
        *("moe_router_topk_scaling_factor", "moe_router_score_function", "moe_router_enable_expert_bias"),
        *("moe_apply_probs_on_input", "moe_mlp_glu_interleave_size", "moe_shared_expert_glu_interleave_size"),
        *("use_mup", "is_hybrid_model", "heterogeneous_block_specs"),
    ),
    "follows from the model; take it out, or change the model's own config",
)
_FP8_WEIGHTS = "keeps weights in a format that dagrl cannot hand to generators or export; take it out"

CLASHES: dict[str, tuple[Clash, ...]] = {
    "transformer": (
        *(
            Clash((name,), f"is not said here; say it as `parallel.{name}` of the engine")
            for name in ParallelSpec.model_fields
        ),
        _FROM_MODEL,
        # -- what the engine sets
        Clash(
            ("calculate_per_token_loss",),
            "must be true, for the loss is a mean over the global batch; take it out",
            harmless=(True,),
        ),
        Clash(("params_dtype", "pipeline_dtype", "autocast_dtype"), "follows from `bf16`; take it out"),
        Clash(("fp16", "enable_autocast"), "is not how dagrl trains; take it out, and say `bf16`", harmless=(False,)),
        Clash(("variable_seq_lengths",), "follows from the layout, as packs vary in length; take it out"),
        Clash(
            ("perform_initialization", "use_cpu_initialization", "init_model_with_meta_device"),
            "is of no use, as all weights are loaded; take it out",
            harmless=(False,),
        ),
        Clash(
            ("transformer_impl",),
            "cannot be chosen: dagrl takes Transformer Engine's modules, or plain ones without a GPU; take it out",
            harmless=("transformer_engine",),
        ),
        Clash(("use_inference_optimized_layers",), "is for a server, and dagrl trains; take it out", harmless=(False,)),
        # -- layouts that `parallel` does not know
        Clash(
            (
                "tensor_parallel_num_weight_shards",
                "gtp_weight_remat_size",
                "expert_tensor_parallel_num_weight_shards",
                "expert_gtp_weight_remat_size",
            ),
            "shares weights out over ranks that the layout does not know of; take it out",
            harmless=(None, 1),
        ),
        Clash(
            ("hybrid_context_parallel", "hierarchical_context_parallel_sizes", "max_seqlen_per_dp_cp_rank"),
            "needs Megatron's own data loader; take it out, and say `parallel.context_parallel_size`",
            harmless=(None, False),
        ),
        Clash(
            ("cp_comm_type",),
            "needs process groups that the engine does not make; choose p2p, all_gather or a2a",
            harmless=(None, "p2p", "all_gather", "a2a"),
        ),
        # -- the pipeline
        Clash(
            ("overlap_p2p_comm", "overlap_p2p_comm_warmup_flush"),
            "is for the interleaved schedule, and Megatron refuses it in others; take it out, or set "
            "parallel.virtual_pipeline_model_parallel_size",
            harmless=(False,),
            where=_not_interleaved,
        ),
        Clash(
            ("overlap_p2p_comm",),
            "must be true with virtual pipeline stages, for two stages get wrong gradients without it; take it out",
            harmless=(True,),
            where=_interleaved,
        ),
        Clash(
            ("batch_p2p_comm",),
            "must be false with virtual pipeline stages, for two stages get wrong gradients with it; take it out",
            harmless=(False,),
            where=_interleaved,
        ),
        Clash(("use_ring_exchange_p2p",), "needs a torch that was built for it; take it out", harmless=(False,)),
        Clash(
            ("pipeline_model_parallel_comm_backend",),
            "is chosen by the engine when ranks meet; take it out",
            harmless=(None,),
        ),
        Clash(
            ("defer_embedding_wgrad_compute",),
            "waits for an output layer that dagrl computes itself, and its gradient would be lost; take it out",
            harmless=(False,),
        ),
        Clash(
            ("num_microbatches_with_partial_activation_checkpoints",),
            "needs Megatron's own training step; take it out, and say recompute_granularity",
            harmless=(None,),
        ),
        Clash(
            ("overlap_moe_expert_parallel_comm", "delay_wgrad_compute", "ep_overlap_early_attn_memory_release"),
            "runs a schedule of its own, which cannot take dagrl's packs; take it out",
            harmless=(False,),
        ),
        Clash(
            ("mtp_num_layers",),
            "adds layers for tokens beyond the next, which no loss of dagrl trains; take it out",
            harmless=(None, 0),
        ),
        # -- what needs a fixed length
        Clash(
            ("tp_comm_overlap",),
            "works in buffers of one fixed length, and packs vary in length; take it out",
            harmless=(False,),
        ),
        Clash(
            ("enable_cuda_graph", "external_cuda_graph", "cuda_graph_impl", "cuda_graph_scope"),
            "repeats what was recorded for one fixed length, and packs vary in length; take it out",
            harmless=(None, False, "none"),
        ),
        # -- what makes log-probs depend on chance, or on the other rows of a pack
        Clash(
            ("hidden_dropout", "attention_dropout", "moe_input_jitter_eps"),
            "draws noise in training only, so that log-probs are not those that the samples had; set it to 0",
            harmless=(None, 0, 0.0),
        ),
        Clash(
            (
                "moe_expert_capacity_factor",
                "moe_pad_expert_input_to_capacity",
                "moe_token_dropping",
                "moe_expert_rank_capacity_factor",
            ),
            "drops tokens by what they are packed with, so that log-probs depend on the packing; take it out",
            harmless=(None, False),
        ),
        Clash(
            ("moe_router_load_balancing_type",),
            "routes tokens by what they are packed with, so that log-probs depend on the packing; choose aux_loss, "
            "global_aux_loss or none",
            harmless=("aux_loss", "seq_aux_loss", "global_aux_loss", "none"),
        ),
        Clash(
            ("moe_router_load_balancing_type",),
            "takes a whole pack for one sequence, so that seq_aux_loss is no loss of a sequence; choose aux_loss, "
            "global_aux_loss or none",
            harmless=("aux_loss", "global_aux_loss", "none"),
        ),
        Clash(
            ("moe_enable_routing_replay",),
            "is not said here; say it as `router_replay` of the engine",
            harmless=(False,),
        ),
        Clash(
            ("moe_router_force_load_balancing", "moe_router_force_biased"),
            "routes tokens by chance, not by the model; take it out",
            harmless=(None, False),
        ),
        Clash(
            ("moe_token_dispatcher_type",),
            "takes no packs of varying length, which pipeline stages send each other; choose alltoall",
            harmless=("alltoall", "flex"),
            where=_pipelined,
        ),
        # -- what would be without effect, or undone
        Clash(("fp8_param", "fp4_param"), _FP8_WEIGHTS, harmless=(False,)),
        Clash(
            ("mla_down_proj_fusion",),
            "joins weights that dagrl converts one by one; take it out",
            harmless=(False,),
        ),
        Clash(
            ("moe_single_grouped_weight", "moe_single_grouped_bias"),
            "joins experts in one parameter of another name, and dagrl converts them one by one; take it out",
            harmless=(False,),
        ),
        Clash(
            ("cross_entropy_loss_fusion",),
            "has no effect, as dagrl computes log-probs itself; take it out, or say fused_linear_cross_entropy",
            harmless=(False,),
        ),
        Clash(("qk_clip",), "needs a step of Megatron's own training loop after each update; take it out", (False,)),
    ),
    "optimizer": (
        Clash(("min_lr",), "is not said here; say it as `lr_schedule.min_lr` of the engine"),
        Clash(("overlap_param_gather",), "is not said here; say it as `ddp.overlap_param_gather` of the engine"),
        Clash(("bf16", "params_dtype"), "follows from the model's precision; take it out, and say `transformer.bf16`"),
        Clash(("fp16",), "is not how dagrl trains; take it out, and say `transformer.bf16`", harmless=(False,)),
        Clash(
            ("loss_scale",),
            "would divide gradients by a factor that only fp16 training multiplies losses with; take it out",
            harmless=(None,),
        ),
        Clash(
            ("optimizer",),
            "is no optimizer whose state dagrl can save for another layout; choose adam or sgd",
            harmless=("adam", "sgd"),
        ),
        Clash(
            ("use_layer_wise_distributed_optimizer",),
            "is for optimizers that dagrl does not have; take it out",
            harmless=(False,),
        ),
        Clash(
            ("overlap_param_gather_with_optimizer_step",),
            "needs gradient buckets that the engine does not make; take it out, or say ddp.overlap_param_gather",
            harmless=(False,),
        ),
        Clash(
            ("optimizer_cuda_graph",),
            "repeats what was recorded for addresses that offloading and sleeping change; take it out",
            harmless=(False,),
        ),
        Clash(("reuse_grad_buf_for_mxfp8_param_ag",), _FP8_WEIGHTS, harmless=(False,)),
    ),
    "ddp": (
        Clash(
            ("use_distributed_optimizer",),
            "is not said here; say it as `optimizer.use_distributed_optimizer` of the engine",
        ),
        Clash(
            ("average_in_collective",),
            "would average gradients, which are parts of one global loss; take it out",
            harmless=(False,),
        ),
        Clash(
            ("use_megatron_fsdp", "use_custom_fsdp", "data_parallel_sharding_strategy", "outer_dp_sharding_strategy"),
            "is another way to hold a model, which dagrl does not have; take it out",
            harmless=(False, "no_shard"),
        ),
        Clash(
            ("num_distributed_optimizer_instances",),
            "needs process groups that the engine does not make; leave it at 1",
            harmless=(1,),
        ),
        Clash(
            ("overlap_param_gather",),
            "gathers what only a distributed optimizer shares out; set optimizer.use_distributed_optimizer to true",
            harmless=(False,),
            where=_optimizer_not_distributed,
        ),
        Clash(
            ("align_param_gather", "delay_wgrad_compute"),
            "needs Megatron's own training loop; take it out",
            harmless=(False,),
        ),
        Clash(
            ("fp8_param_gather", "fp4_param_gather", "reuse_grad_buf_for_mxfp8_param_ag"),
            _FP8_WEIGHTS,
            harmless=(False,),
        ),
    ),
}
"""Section -> what clashes in it. Where several hit a field, the first one is told."""
