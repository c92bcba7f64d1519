"""verl and siiRL: Hydra's keys of ``ppo_trainer.yaml`` and ``ppo_megatron_trainer.yaml``.

siiRL has verl's keys, with a few more and other defaults.
"""

from __future__ import annotations

from dagrl.importing import finishing
from dagrl.importing.table import Framework
from dagrl.importing.verl import actor, algorithm, data, engines, rollout, run
from dagrl.importing.verl.common import ACTOR, REF, ROLLOUT

_DEFAULTS = {
    "data.train_files": "~/data/rlhf/gsm8k/train.parquet",
    "data.val_files": "~/data/rlhf/gsm8k/test.parquet",
    "data.train_batch_size": 1024,
    "data.max_prompt_length": 512,
    "data.max_response_length": 512,
    "data.filter_overlong_prompts": False,
    "data.truncation": "error",
    "actor_rollout_ref.model.path": "~/models/deepseek-llm-7b-chat",
    "actor_rollout_ref.model.enable_gradient_checkpointing": True,
    "actor_rollout_ref.model.lora_rank": 0,
    "actor_rollout_ref.model.lora_alpha": 16,
    "actor_rollout_ref.model.lora.rank": 0,
    "actor_rollout_ref.model.lora.alpha": 32,
    f"{ACTOR}.strategy": "fsdp",
    f"{ACTOR}.ppo_mini_batch_size": 256,
    f"{ACTOR}.use_dynamic_bsz": False,
    f"{ACTOR}.ppo_max_token_len_per_gpu": 16384,
    f"{ACTOR}.clip_ratio_low": 0.2,
    f"{ACTOR}.clip_ratio_high": 0.2,
    f"{ACTOR}.clip_ratio_c": 3.0,
    f"{ACTOR}.loss_agg_mode": "token-mean",
    f"{ACTOR}.policy_loss.loss_mode": "vanilla",
    f"{ACTOR}.policy_loss.clip_cov_ratio": 2.0e-4,
    f"{ACTOR}.policy_loss.clip_cov_lb": 1.0,
    f"{ACTOR}.policy_loss.clip_cov_ub": 5.0,
    f"{ACTOR}.policy_loss.kl_cov_ratio": 2.0e-4,
    f"{ACTOR}.policy_loss.ppo_kl_coef": 0.1,
    f"{ACTOR}.entropy_coeff": 0,
    f"{ACTOR}.use_kl_loss": False,
    f"{ACTOR}.kl_loss_coef": 0.001,
    f"{ACTOR}.kl_loss_type": "low_var_kl",
    f"{ACTOR}.ulysses_sequence_parallel_size": 1,
    f"{ACTOR}.optim.lr": 1.0e-6,
    f"{ACTOR}.optim.weight_decay": 0.01,
    f"{ACTOR}.megatron.sequence_parallel": True,
    f"{ROLLOUT}.name": "vllm",
    f"{ROLLOUT}.tensor_model_parallel_size": 2,
    f"{ROLLOUT}.gpu_memory_utilization": 0.5,
    f"{ROLLOUT}.n": 1,
    f"{REF}.log_prob_max_token_len_per_gpu": None,
    "algorithm.adv_estimator": "gae",
    "algorithm.use_kl_in_reward": False,
    "algorithm.kl_penalty": "kl",
    "algorithm.kl_ctrl.type": "fixed",
    "algorithm.kl_ctrl.kl_coef": 0.001,
    "algorithm.kl_ctrl.horizon": 10000,
    "algorithm.kl_ctrl.target_kl": 0.1,
    "algorithm.filter_groups.metric": "reward",
    "algorithm.filter_groups.max_num_gen_batches": 0,
    "algorithm.rollout_correction.rollout_is_threshold": 2.0,
    "critic.optim.lr": 1.0e-5,
    "critic.optim.weight_decay": 0.01,
    "critic.ppo_max_token_len_per_gpu": 32768,
    "critic.megatron.sequence_parallel": True,
    "reward.custom_reward_function.name": "compute_score",
    "custom_reward_function.name": "compute_score",
    "trainer.total_epochs": 30,
    "trainer.nnodes": 1,
    "trainer.n_gpus_per_node": 8,
    "trainer.save_freq": -1,
    "trainer.test_freq": -1,
    "trainer.val_before_train": True,
    "trainer.logger": ["console", "wandb"],
    "trainer.experiment_name": "gsm8k",
}
"""Defaults of verl 0.9 that rules read."""

_RULES = (
    *run.TRAINER_GROUPS,
    *data.DATA,
    *actor.ENGINE,
    *engines.MODEL_RULES,
    engines.optimizer(ACTOR, "actor"),
    *rollout.RULES,
    *algorithm.RULES,
    *actor.UPDATE,
    *engines.REFERENCE,
    *engines.CRITIC,
    *data.REWARD,
    *run.TRAINER,
    engines.schedule(ACTOR, "actor"),
    engines.schedule("critic", "critic"),
    *finishing.RULES,
)

VERL = Framework(
    "verl",
    "verl 0.9",
    _RULES,
    _DEFAULTS,
    program=r"(verl|recipe)(\.\w+)*\.main_\w+|main_ppo\.py",
    sections=("actor_rollout_ref",),
    is_hydra=True,
)
SIIRL = Framework(
    "siirl",
    "siiRL 0.2",
    _RULES,
    {
        **_DEFAULTS,
        f"{ACTOR}.megatron.sequence_parallel": False,
        "critic.megatron.sequence_parallel": False,
        f"{ROLLOUT}.tensor_model_parallel_size": 1,
        "algorithm.filter_groups.metric": "acc",
        "algorithm.filter_groups.max_num_gen_batches": 10,
    },
    program=r"siirl(\.\w+)*\.main_\w+",
    sections=("dag",),
    is_hydra=True,
)
