"""ROLL's keys that have no counterpart, or need none."""

from __future__ import annotations

from dagrl.importing.table import implied, refused, refused_unless

RULES = (
    refused(
        "rewards and advantages are not clipped: an estimator of your own (docs/your_own.md)",
        "reward_clip advantage_clip",
    ),
    refused_unless(False, "a mask of your own leaves them out (docs/migration.md)", "max_len_mask error_max_len_clip"),
    refused_unless(
        False, "groups are replaced, never masked: `nodes.keep` with `lower` and `upper`", "difficulty_mask"
    ),
    refused_unless(
        (False, 0, 0.0, 1, 1.0, None),
        "has no counterpart in the loss",
        "difficulty_loss_weight length_loss_weight use_topr_neg_loss_coef rl_loss_coef reward_shift reward_scale",
    ),
    refused("mix the rows of the file beforehand", "*.domain_interleave_probs* *.interleave_probs"),
    refused_unless(1, "samples are drawn, without beams", "*.num_beams"),
    refused(
        "environments and agents are classes of your own (docs/multi_turn.md)",
        "custom_envs* *env_manager* *_env_* env_* max_tokens_per_step max_actions_per_traj "
        "reward_normalization* *.max_env_num_per_worker",
    ),
    refused("is `profile` of the pipeline (docs/profiling.md)", "profiler_* *profiler*"),
    implied(
        "follows from the pipeline and the model",
        "*.model_args.* *.data_args.* *.training_args.* *.world_size *.worker_cls *.use_remove_padding "
        "*.offload_nccl *.generating_args.* *.system_envs* *.name global_template "
        "difficulty_low_threshold difficulty_high_threshold val_* *old_logprobs_recompute "
        "model_download_type reward_model*",
    ),
    implied("`sleep: auto` offloads while another engine of the group works", "offload_*"),
    implied(
        "is `dagrl run --run-dir DIR`",
        "output_dir logging_dir checkpoint_config* rollout_dump_dir resume_from_checkpoint",
    ),
    refused("trackers read their own environment", "tracker_kwargs*"),
    implied(
        "belongs to the launch",
        "hydra* defaults* logging_steps system_envs* generate_opt_level is_num_return_sequences_expand "
        "max_running_requests rollout_mock*",
    ),
)
