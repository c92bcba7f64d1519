"""verl's run."""

from __future__ import annotations

from dagrl.importing import parts
from dagrl.importing.settings import Unresolved
from dagrl.importing.table import Translation, implied, joint, refused, refused_unless, to, under
from dagrl.importing.verl.common import uses_critic


@joint("trainer.nnodes trainer.n_gpus_per_node", always=True)
def _groups(t: Translation) -> None:
    parts.first_group(t, "gpus", "trainer.nnodes", "trainer.n_gpus_per_node")
    t.put("engines.generator.group", "gpus")
    if uses_critic(t):
        t.put("engines.critic.group", "gpus")


@joint("trainer.total_training_steps trainer.total_epochs", always=True)
def _steps(t: Translation) -> None:
    total = "trainer.total_training_steps"
    if t.number(total) or isinstance(t.get(total), Unresolved):
        t.copy(total, "run.steps")
    else:
        parts.write_epochs(t, "trainer.total_epochs")


@joint("trainer.save_freq trainer.test_freq trainer.val_before_train", always=True)
def _every(t: Translation) -> None:
    t.copy("trainer.save_freq", "run.save_every", above=0)
    if parts.has_val_data(t):
        t.copy("trainer.test_freq", "run.validate_every", above=0)
    if parts.has_val_data(t) and t.flag("trainer.val_before_train"):
        t.copy("trainer.val_before_train", "run.validate_first")


@joint("trainer.val_only")
def _val_only(t: Translation) -> None:
    """Verl reads ``val_only`` after the validation before the first step."""
    key = "trainer.val_only"
    if t.flag(key) and not parts.has_val_data(t):
        t.refuse("there is no validation set", key)
    elif t.flag(key) and t.flag("trainer.val_before_train"):
        t.copy(key, "run.val_only")


@joint("trainer.critic_warmup")
def _warmup(t: Translation) -> None:
    """Verl trains the policy from step ``critic_warmup`` on, counted from 1."""
    key = "trainer.critic_warmup"
    value = t.number(key, 0)
    if value > 1 and uses_critic(t):
        t.write("nodes.update.critic_warmup", value - 1, key, note="steps before it, which verl counts from 1")


@joint("trainer.resume_mode")
def _resume(t: Translation) -> None:
    mode = t.get("trainer.resume_mode")
    if mode == "disable":
        t.write("run.resume", "never", "trainer.resume_mode")
    elif mode not in ("auto", None):
        t.refuse("a run goes on in its own folder: `dagrl run --run-dir DIR`", "trainer.resume_mode")


@joint(always=True)
def _update(t: Translation) -> None:
    parts.put_node(t, "update", "update", "actor")


TRAINER_GROUPS = (parts.named("trainer.experiment_name"), _groups)
TRAINER = (
    _steps,
    _every,
    _val_only,
    _warmup,
    parts.kept("trainer.max_actor_ckpt_to_keep"),
    _resume,
    parts.tracked("trainer.logger", project="trainer.project_name", name="trainer.experiment_name"),
    to("trainer.log_val_generations", "run.log_val_generations"),
    to("trainer.seed", "run.seed"),
    _update,
    refused("a run goes on in its own folder: `dagrl run --run-dir DIR`", "trainer.resume_from_path"),
    refused_unless(("cuda", "gpu"), "GPUs are NVIDIA's", "trainer.device"),
    refused("checkpoints stay in the run folder", "trainer.default_hdfs_dir"),
    implied("a checkpoint holds all engines", "trainer.max_critic_ckpt_to_keep"),
    implied("is `dagrl run --run-dir DIR`", "trainer.default_local_dir"),
    implied(
        "is done by itself, or is part of the run folder",
        under(
            "trainer",
            "balance_batch rollout_data_dir validation_data_dir del_local_ckpt_after_load "
            "ray_wait_register_center_timeout esi_redundant_time use_legacy_worker_impl profile*",
        ),
        "*_target_ ray_kwargs* global_profiler* transfer_queue* hydra* defaults* dag* --config-path",
    ),
)
