"""Fields of Megatron-core's config classes that are tested with dagrl, and fields that dagrl sets itself.

Checked against Megatron-core 0.19.2. Other fields go under ``extra:`` of an engine.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from dagrl.config.errors import removal
from dagrl.config.schema.library_fields import UNSET, LibraryFields
from dagrl.config.schema.section import Coefficient, PositiveInt

_Decay = Annotated[float, Field(ge=0, lt=1)]
_BalancingLoss = Literal["aux_loss", "global_aux_loss", "none"]
_NumberFormat = Literal["fp32", "float32", "fp16", "float16", "bf16", "bfloat16", "fp8", "uint8"]
"""The keys of `dagrl.model_files.number_formats.NUMBER_FORMATS`."""
_RecomputedModule = Literal[
    "core_attn", "gdn_norm_out", "layernorm", "mla_up_proj", "mlp", "moe", "moe_act", "shared_experts"
]

_PARALLEL = """
    tensor_model_parallel_size pipeline_model_parallel_size virtual_pipeline_model_parallel_size
    context_parallel_size expert_model_parallel_size expert_tensor_parallel_size sequence_parallel
""".split()  # noqa: SIM905 (a list would take a line for each)
_MODEL = """
    num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups kv_channels
    normalization layernorm_epsilon layernorm_zero_centered_gamma qk_layernorm qk_l2_norm
    add_bias_linear add_qkv_bias gated_linear_unit activation_func glu_linear_offset
    activation_func_clamp_value apply_residual_connection_post_layernorm attention_output_gate
    rotary_interleaved no_rope_freq mrope_section softmax_scale softmax_type
    window_size window_attn_skip_freq experimental_attention_variant linear_attention_freq
    linear_num_key_heads linear_num_value_heads linear_key_head_dim linear_value_head_dim linear_conv_kernel_dim
    multi_latent_attention q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim
    rope_type rotary_base rotary_percent rotary_scaling_factor original_max_position_embeddings
    beta_fast beta_slow mscale mscale_all_dim mtp_num_layers mla_down_proj_fusion
    num_moe_experts moe_layer_freq moe_ffn_hidden_size moe_latent_size moe_router_topk
    moe_shared_expert_intermediate_size moe_shared_expert_gate moe_router_num_groups
    moe_router_group_topk moe_router_topk_limited_devices moe_router_pre_softmax
    moe_router_topk_scaling_factor moe_router_score_function moe_router_enable_expert_bias
    moe_apply_probs_on_input moe_mlp_glu_interleave_size moe_shared_expert_glu_interleave_size
    use_mup is_hybrid_model heterogeneous_block_specs
""".split()  # noqa: SIM905 (a list would take a line for each)
_SCHEDULE = ("lr_warmup_steps", "lr_warmup_ratio", "lr_decay_style", "lr_decay_steps")
"""Fields of the engine's ``lr_schedule``, which are Megatron arguments outside of OptimizerConfig."""
FP8_RECIPE = "blockwise"
"""Default of ``fp8_recipe``; it needs no history of earlier steps, unlike Megatron's default."""
_NO_FP16 = "dagrl trains in bfloat16 or float32; remove it, and set `transformer.bf16`"


class TransformerFields(LibraryFields):
    """Fields of Megatron's TransformerConfig that are tested with dagrl; others go under ``extra``."""

    library_class: ClassVar = ("megatron", "core/transformer/transformer_config.py", "MLATransformerConfig")
    called_elsewhere: ClassVar = {
        "gradient_checkpointing": ("recompute_granularity",),
        "activation_checkpointing": ("recompute_granularity",),
        "attn_implementation": ("attention_backend",),
        "router_aux_loss_coef": ("moe_aux_loss_coeff",),
    }

    bf16: bool = UNSET
    """Compute in bfloat16 instead of float32. Default: on GPUs."""
    deallocate_pipeline_outputs: bool = UNSET
    """Default: true."""
    microbatch_group_size_per_vp_stage: PositiveInt = UNSET
    """At least the number of pipeline stages."""
    num_layers_in_first_pipeline_stage: PositiveInt = UNSET
    num_layers_in_last_pipeline_stage: PositiveInt = UNSET
    pipeline_model_parallel_layout: str | list[list[str]] = UNSET
    account_for_embedding_in_pipeline_split: bool = UNSET
    account_for_loss_in_pipeline_split: bool = UNSET
    attention_backend: Literal["flash", "fused", "unfused", "auto"] = UNSET
    bias_activation_fusion: bool = UNSET
    """Default: on GPUs."""
    apply_rope_fusion: bool = UNSET
    """Default: on GPUs."""
    recompute_granularity: Literal["full", "selective"] = UNSET
    """``full`` needs the two fields below too."""
    recompute_method: Literal["uniform", "block"] = UNSET
    recompute_num_layers: PositiveInt = UNSET
    recompute_modules: list[_RecomputedModule] = UNSET
    """For ``selective``."""
    fp8: Literal["e4m3", "hybrid"] = UNSET
    """Compute the products of linear layers in fp8: all in e4m3, or products with gradients in e5m2 (``hybrid``).
    Weights stay in bfloat16. On GPUs only."""
    fp8_recipe: Literal["blockwise", "tensorwise", "delayed"] = UNSET
    """Scales for each block, for each tensor, or for each tensor from earlier steps. Default: blockwise."""
    moe_router_load_balancing_type: _BalancingLoss | list[_BalancingLoss] = UNSET
    """Others route a token by its neighbours in the pack, so that log-probs depend on the packing. Default: none."""
    moe_router_dtype: Literal["fp32", "fp64"] = UNSET
    """Default: fp32."""
    moe_router_bias_update_rate: Coefficient = UNSET
    """Default: 0."""
    moe_grouped_gemm: bool = UNSET
    """Default: true."""
    moe_aux_loss_coeff: Coefficient | list[Coefficient] = UNSET
    """Default: 0."""
    moe_z_loss_coeff: Coefficient = UNSET
    moe_token_dispatcher_type: Literal["allgather", "alltoall"] = UNSET
    """``allgather`` without pipeline stages only. Default: alltoall."""
    moe_layer_recompute: bool = UNSET
    moe_permute_fusion: bool = UNSET

    refused: ClassVar = {
        **{name: f"has another place; set `parallel.{name}` of the engine" for name in _PARALLEL},
        **dict.fromkeys(_MODEL, "follows from the model; remove it, or change the model's config"),
        **dict.fromkeys(("params_dtype", "pipeline_dtype", "autocast_dtype"), removal("follows from `bf16`")),
        **dict.fromkeys(("fp16", "enable_autocast"), _NO_FP16),
        **dict.fromkeys(
            ("perform_initialization", "use_cpu_initialization", "init_model_with_meta_device"),
            removal("dagrl loads all weights"),
        ),
        **dict.fromkeys(
            ("variable_seq_lengths", "overlap_p2p_comm", "batch_p2p_comm", "pipeline_model_parallel_comm_backend"),
            removal("follows from the pipeline layout: other values give wrong numbers"),
        ),
        **dict.fromkeys(
            ("hidden_dropout", "attention_dropout", "moe_input_jitter_eps"),
            removal("is 0: log-probs in training must not depend on chance"),
        ),
        "calculate_per_token_loss": removal("is true: the loss is a mean over the global batch"),
        "fp8_param": removal("is false: weights are loaded, sent and saved in bfloat16"),
        "transformer_impl": removal("follows from the devices"),
        "moe_enable_routing_replay": "has another place; set `router_replay` of the engine",
    }


class OptimizerFields(LibraryFields):
    """Fields of Megatron's OptimizerConfig that are tested with dagrl; others go under ``extra``."""

    library_class: ClassVar = ("megatron", "core/optimizer/optimizer_config.py", "OptimizerConfig")
    called_elsewhere: ClassVar = {
        **dict.fromkeys(("learning_rate", "max_lr", "peak_lr"), ("lr",)),
        **dict.fromkeys(("max_grad_norm", "grad_clip", "gradient_clipping", "max_norm"), ("clip_grad",)),
        **dict.fromkeys(("betas", "adam_betas"), ("adam_beta1", "adam_beta2")),
        **dict.fromkeys(("eps", "epsilon", "adam_epsilon"), ("adam_eps",)),
        "beta1": ("adam_beta1",),
        "beta2": ("adam_beta2",),
        "momentum": ("sgd_momentum",),
        **{name: (f"lr_schedule.{name}",) for name in _SCHEDULE},
        "type": ("optimizer",),
    }

    lr: Annotated[float, Field(gt=0, le=1)] = UNSET
    """Peak of the learning rate. Required for an engine that a node trains."""
    weight_decay: Coefficient = UNSET
    use_precision_aware_optimizer: bool = UNSET
    """Needs adam and the distributed optimizer."""
    store_param_remainders: bool = UNSET
    main_grads_dtype: _NumberFormat = UNSET
    """Less than float32 needs the precision-aware optimizer; so do the three fields below."""
    main_params_dtype: _NumberFormat = UNSET
    exp_avg_dtype: _NumberFormat = UNSET
    exp_avg_sq_dtype: _NumberFormat = UNSET
    optimizer: Literal["adam", "sgd"] = UNSET
    """States of other optimizers cannot be saved for another layout."""
    adam_beta1: _Decay = UNSET
    adam_beta2: _Decay = UNSET
    adam_eps: Annotated[float, Field(gt=0, allow_inf_nan=False)] = UNSET
    """Must not be 0: the step of a weight without a gradient would be 0 / 0."""
    decoupled_weight_decay: bool = UNSET
    sgd_momentum: _Decay = UNSET
    use_distributed_optimizer: bool = UNSET
    """Default: true."""
    optimizer_cpu_offload: bool = UNSET
    """The optimizer's step on the host."""
    optimizer_offload_fraction: Annotated[float, Field(gt=0, le=1)] = UNSET
    """Part of the optimizer on the host. Default: 1."""
    clip_grad: Coefficient = UNSET
    """Largest norm of the gradient; 0: none. Default: 1."""

    refused: ClassVar = {
        "min_lr": "has another place; set `lr_schedule.min_lr` of the engine",
        "overlap_param_gather": "has another place; set `ddp.overlap_param_gather` of the engine",
        **dict.fromkeys(("bf16", "params_dtype"), removal("follows from `transformer.bf16`")),
        "fp16": _NO_FP16,
        "fp8_recipe": removal("follows from `transformer.fp8_recipe`"),
        "loss_scale": removal("is for fp16, which dagrl does not train in"),
    }


class DdpFields(LibraryFields):
    """Fields of Megatron's DistributedDataParallelConfig that are tested with dagrl; others go under ``extra``."""

    library_class: ClassVar = (
        "megatron",
        "core/distributed/distributed_data_parallel_config.py",
        "DistributedDataParallelConfig",
    )

    grad_reduce_in_fp32: bool = UNSET
    """Default: true."""
    overlap_grad_reduce: bool = UNSET
    overlap_param_gather: bool = UNSET
    """Needs the distributed optimizer."""
    bucket_size: PositiveInt = UNSET
    """Parameters in a bucket, with ``overlap_grad_reduce``."""
    nccl_ub: bool = UNSET
    """Not on an engine that sleeps or offloads."""

    refused: ClassVar = {
        "fp8_param_gather": removal("is false: weights stay in bfloat16"),
        "use_distributed_optimizer": "has another place; set `optimizer.use_distributed_optimizer` of the engine",
        "average_in_collective": removal("is false: gradients are parts of one global loss"),
        **dict.fromkeys(("use_megatron_fsdp", "use_custom_fsdp"), removal("is false: dagrl has no FSDP")),
    }
