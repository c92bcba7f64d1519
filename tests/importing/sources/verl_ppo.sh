# PPO with a critic on two machines, a divergence in the reward that is steered, and a reward function of its own.
MODEL=Qwen/Qwen2.5-7B
STRATEGY=${1:-fsdp2}; shift || true
python3 -m verl.trainer.main_ppo \
    algorithm.adv_estimator=gae algorithm.gamma=1.0 algorithm.lam=0.95 \
    algorithm.use_kl_in_reward=True algorithm.kl_penalty=kl \
    algorithm.kl_ctrl.type=adaptive algorithm.kl_ctrl.kl_coef=0.01 \
    data.train_files=data/math/train.parquet data.val_files=data/math/test.parquet \
    data.train_batch_size=512 data.max_prompt_length=1024 data.max_response_length=2048 data.truncation=left \
    actor_rollout_ref.model.path=$MODEL \
    actor_rollout_ref.model.use_fused_kernels=True \
    actor_rollout_ref.actor.strategy=$STRATEGY \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.optim.lr_scheduler_type=cosine \
    actor_rollout_ref.actor.optim.min_lr_ratio=0.1 \
    actor_rollout_ref.actor.optim.lr_warmup_steps_ratio=0.05 \
    actor_rollout_ref.actor.ppo_mini_batch_size=128 \
    actor_rollout_ref.actor.ppo_epochs=2 \
    actor_rollout_ref.actor.use_dynamic_bsz=True \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=12288 \
    actor_rollout_ref.actor.grad_clip=0.5 \
    actor_rollout_ref.actor.entropy_coeff=0.001 \
    actor_rollout_ref.rollout.name=sglang \
    actor_rollout_ref.rollout.tensor_model_parallel_size=2 \
    actor_rollout_ref.rollout.temperature=0.9 actor_rollout_ref.rollout.top_p=0.95 \
    critic.strategy=$STRATEGY \
    critic.model.path=$MODEL \
    critic.optim.lr=1e-5 \
    critic.ppo_max_token_len_per_gpu=24576 \
    critic.fsdp.param_offload=False \
    critic.cliprange_value=0.2 \
    custom_reward_function.path=rewards/my_math.py custom_reward_function.name=score \
    reward_model.overlong_buffer.enable=True reward_model.overlong_buffer.len=512 \
    trainer.critic_warmup=10 \
    trainer.logger=console trainer.experiment_name=ppo trainer.project_name=verl \
    trainer.n_gpus_per_node=8 trainer.nnodes=2 \
    trainer.max_actor_ckpt_to_keep=2 trainer.save_freq=50 trainer.test_freq=10 \
    trainer.total_training_steps=200 "$@"
