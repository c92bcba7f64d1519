#!/usr/bin/env bash
# DAPO with siiRL: an array that eval expands, functions around the call.
export DATASET=dapo17k
export ALG=grpo
export HOME=/data
export TRAIN_DATA_PATH=$HOME/datasets/$DATASET/train.parquet
export TEST_DATA_PATH=$HOME/datasets/$DATASET/test.parquet
export MODEL_PATH=Qwen/Qwen3-8B
export N_GPUS_PER_NODE=${N_GPUS_PER_NODE:-8}
export NNODES=${PET_NNODES:-2}
export NODE_RANK=${PET_NODE_RANK:-0}
export BATCH_PER_NODE=128
export BATCH=$(($BATCH_PER_NODE * $NNODES))

TRAINING_CMD=(
    python3 -m siirl.main_dag
    algorithm.adv_estimator=\$ALG
    algorithm.filter_groups.enable=True
    algorithm.filter_groups.metric=seq_reward
    algorithm.filter_groups.max_num_gen_batches=10
    data.train_files=\$TRAIN_DATA_PATH
    data.val_files=\$TEST_DATA_PATH
    data.train_batch_size=\$BATCH
    data.gen_batch_size=512
    data.max_prompt_length=2048
    data.max_response_length=8192
    data.truncation='left'
    actor_rollout_ref.model.path=\$MODEL_PATH
    actor_rollout_ref.actor.strategy=megatron
    actor_rollout_ref.actor.megatron.tensor_model_parallel_size=4
    actor_rollout_ref.actor.megatron.sequence_parallel=False
    actor_rollout_ref.actor.megatron.param_dtype=bfloat16
    actor_rollout_ref.actor.optim.lr=1e-6
    actor_rollout_ref.actor.grad_clip=0.5
    actor_rollout_ref.actor.ppo_mini_batch_size=32
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2
    actor_rollout_ref.actor.clip_ratio_low=0.2
    actor_rollout_ref.actor.clip_ratio_high=0.28
    actor_rollout_ref.actor.use_cpgd_loss=False
    actor_rollout_ref.rollout.name=vllm
    actor_rollout_ref.rollout.tensor_model_parallel_size=2
    actor_rollout_ref.rollout.gpu_memory_utilization=0.6
    actor_rollout_ref.rollout.n=16
    reward_model.reward_manager=dapo
    reward_model.overlong_buffer.enable=True
    reward_model.overlong_buffer.len=4096
    reward_model.overlong_buffer.penalty_factor=1.0
    dag.workflow_path=examples/workflow_dapo.yaml
    trainer.logger=['console','tensorboard']
    trainer.experiment_name=siirl_\${ALG}_\${DATASET}_\$timestamp
    trainer.n_gpus_per_node=\$N_GPUS_PER_NODE
    trainer.nnodes=\$NNODES
    trainer.save_freq=30
    trainer.test_freq=10
    trainer.total_training_steps=300
)

start_ray() {
    if [ "$NNODES" -gt 1 ]; then
        while ! ray health-check &>/dev/null; do sleep 5; done
    else
        ray start --head
    fi
}

main() {
    local timestamp=run1
    start_ray
    if [ "$NODE_RANK" = "0" ]; then
        eval "${TRAINING_CMD[@]}" "$@"
    fi
}

main "$@"
