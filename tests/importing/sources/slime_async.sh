#!/bin/bash
set -ex
# Asynchronous GSPO with dynamic sampling, partial rollouts and truncated importance sampling, on separate GPUs.
ARGS="--advantage-estimator gspo --eps-clip 4e-4 --calculate-per-token-loss --use-tis --tis-clip 3.0 --lr 2e-6"
MODEL_PATH=${MODEL_PATH:?}
python3 train_async.py $ARGS \
   --hf-checkpoint $MODEL_PATH \
   --prompt-data data/prompts.parquet --input-key prompt --label-key label --apply-chat-template \
   --rollout-max-prompt-len 1024 --rollout-max-response-len 4096 --rollout-batch-size 64 --n-samples-per-prompt 8 \
   --num-steps-per-rollout 2 --num-rollout 500 --over-sampling-batch-size 128 \
   --dynamic-sampling-filter-path slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std \
   --partial-rollout --mask-offpolicy-in-partial-rollout \
   --rm-type math --micro-batch-size 2 \
   --tensor-model-parallel-size 2 --sequence-parallel \
   --actor-num-nodes 1 --actor-num-gpus-per-node 4 --rollout-num-gpus 4 --rollout-num-gpus-per-engine 1 \
   --sglang-mem-fraction-static=0.8 --update-weight-buffer-size $((1024 * 1024 * 512)) --save-interval 50
