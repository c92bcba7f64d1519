#!/usr/bin/env bash
# GRPO of a dense model with Megatron-core and SGLang, in the form of verl's newer examples: knobs, arrays, one call.
set -xeuo pipefail

########################### knobs ###########################
INFER_BACKEND=${INFER_BACKEND:-sglang}
MODEL_PATH=${MODEL_PATH:-Qwen/Qwen3-8B}
NNODES=${NNODES:-1}
NGPUS=${NGPUS:-${GPUS_PER_NODE:-8}}
OFFLOAD=${OFFLOAD:-True}
MCORE_PATH=${MCORE_PATH:-}
batch=${BATCH:-128} mini=${MINI:-32}
prompt_length=$((1024 * 1))
response_length=$((prompt_length * 2))
actor_tp=${ACTOR_TP:-2}
actor_pp=${ACTOR_PP:-2}
experiment=qwen3_8b_${INFER_BACKEND}${SUFFIX:+_${SUFFIX}}

########################### arguments ###########################
DATA=(
    data.train_files="data/gsm8k/train.parquet"
    data.val_files="['data/gsm8k/test.parquet','data/math500/test.parquet']"
    data.train_batch_size=${batch}
    data.max_prompt_length=${prompt_length}
    data.max_response_length=${response_length}
    data.filter_overlong_prompts=True   # slow for large files
    data.truncation='error'
    data.return_raw_chat=True
)
MODEL=(
    actor_rollout_ref.model.path="$MODEL_PATH"
    actor_rollout_ref.model.use_remove_padding=True
)
ACTOR=(
    actor_rollout_ref.actor.optim.lr=1e-6
    actor_rollout_ref.actor.optim.lr_warmup_steps=10
    actor_rollout_ref.actor.ppo_mini_batch_size=${mini}
    actor_rollout_ref.actor.use_dynamic_bsz=True
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=$(((prompt_length + response_length) * 4))
    actor_rollout_ref.actor.clip_ratio_low=0.2
    actor_rollout_ref.actor.clip_ratio_high=0.28
    actor_rollout_ref.actor.clip_ratio_c=10.0
    actor_rollout_ref.actor.use_kl_loss=True
    actor_rollout_ref.actor.kl_loss_coef=0.001
    actor_rollout_ref.actor.kl_loss_type=low_var_kl
    actor_rollout_ref.actor.entropy_coeff=0
    actor_rollout_ref.actor.megatron.tensor_model_parallel_size=${actor_tp}
    actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=${actor_pp}
    actor_rollout_ref.actor.megatron.virtual_pipeline_model_parallel_size=null
    actor_rollout_ref.actor.megatron.param_offload=${OFFLOAD}
    actor_rollout_ref.actor.megatron.optimizer_offload=${OFFLOAD}
    actor_rollout_ref.actor.megatron.use_mbridge=True
    +actor_rollout_ref.actor.megatron.override_transformer_config.recompute_granularity=full
    +actor_rollout_ref.actor.megatron.override_transformer_config.recompute_method=uniform
    +actor_rollout_ref.actor.megatron.override_transformer_config.recompute_num_layers=1
    +actor_rollout_ref.actor.megatron.override_transformer_config.masked_softmax_fusion=True
    actor_rollout_ref.actor.shiny_new_key=3
)
ROLLOUT=(
    actor_rollout_ref.rollout.name=${INFER_BACKEND}
    actor_rollout_ref.rollout.tensor_model_parallel_size=2
    actor_rollout_ref.rollout.gpu_memory_utilization=0.7
    actor_rollout_ref.rollout.n=8
    actor_rollout_ref.rollout.enable_chunked_prefill=True
    actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=True
    actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=24576
    actor_rollout_ref.rollout.val_kwargs.do_sample=True
    actor_rollout_ref.rollout.val_kwargs.temperature=0.6
    actor_rollout_ref.rollout.val_kwargs.n=4
    +actor_rollout_ref.rollout.engine_kwargs.sglang.attention_backend=fa3
)
REF=(
    actor_rollout_ref.ref.log_prob_use_dynamic_bsz=True
    actor_rollout_ref.ref.log_prob_max_token_len_per_gpu=24576
    actor_rollout_ref.ref.megatron.tensor_model_parallel_size=${actor_tp}
    actor_rollout_ref.ref.megatron.pipeline_model_parallel_size=4
)
TRAINER=(
    trainer.logger='["console","wandb"]'
    trainer.project_name=verl_grpo
    trainer.experiment_name=${experiment}
    trainer.n_gpus_per_node=${NGPUS}
    trainer.nnodes=${NNODES}
    trainer.save_freq=20
    trainer.test_freq=5
    trainer.total_epochs=15
    trainer.val_before_train=False
)
EXTRA=(model_engine=megatron)
if [ -n "$MCORE_PATH" ]; then
    EXTRA+=(
        actor_rollout_ref.actor.megatron.use_dist_checkpointing=True
        actor_rollout_ref.actor.megatron.dist_checkpointing_path=${MCORE_PATH}
    )
fi
case "${INFER_BACKEND}" in
    vllm) EXTRA+=(actor_rollout_ref.rollout.enforce_eager=False) ;;
    sglang) EXTRA+=(actor_rollout_ref.rollout.free_cache_engine=True) ;;
    *) echo "unknown $INFER_BACKEND" >&2; exit 1 ;;
esac

python3 -m verl.trainer.main_ppo \
    algorithm.adv_estimator=grpo \
    algorithm.use_kl_in_reward=False \
    "${DATA[@]}" "${MODEL[@]}" "${ACTOR[@]}" "${ROLLOUT[@]}" "${REF[@]}" "${TRAINER[@]}" "${EXTRA[@]}" "$@"
