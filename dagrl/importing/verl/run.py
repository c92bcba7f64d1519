"""verl's run."""

from __future__ import annotations

from dagrl.importing.parts import first_group, has_val_data, keep, named, put_node, tracked, write_epochs
from dagrl.importing.settings import Unresolved
from dagrl.importing.table import Translation, implied, joint, refused, refused_unless, to
from dagrl.importing.verl.common import uses_critic


def _groups(t: Translation) -> None:
    first_group(t, "gpus", "trainer.nnodes", "trainer.n_gpus_per_node")
    t.put("engines.generator.group", "gpus")
    if uses_critic(t):
        t.put("engines.critic.group", "gpus")


def _steps(t: Translation) -> None:
    total, epochs = "trainer.total_training_steps", "trainer.total_epochs"
    if t.number(total) or isinstance(t.get(total), Unresolved):
        t.write("run.steps", t.get(total), total)
        t.imply("`total_training_steps` takes its place", epochs)
    else:
        t.imply("is null, as by default", total)
        write_epochs(t, epochs)


def _every(t: Translation) -> None:
    for key, target in (("trainer.save_freq", "run.save_every"), ("trainer.test_freq", "run.validate_every")):
        value = t.number(key, -1)
        if value > 0 and (has_val_data(t) or target != "run.validate_every"):
            t.write(target, value, key)
        else:
            t.imply("never, as by default", key)
    first = "trainer.val_before_train"
    if t.flag(first) and has_val_data(t):
        t.write("run.validate_first", True, first)
    else:
        t.imply("there is no validation before the first step, as by default", first)


def _val_only(t: Translation) -> None:
    """Verl reads ``val_only`` after the validation before the first step."""
    key = "trainer.val_only"
    if not t.flag(key):
        t.imply("a run trains, as by default", key)
    elif not has_val_data(t):
        t.refuse("there is no validation set", key)
    elif t.flag("trainer.val_before_train"):
        t.write("run.val_only", True, key)
    else:
        t.imply("has no effect without `val_before_train`", key)


def _warmup(t: Translation) -> None:
    """Verl trains the policy from step ``critic_warmup`` on, counted from 1."""
    key = "trainer.critic_warmup"
    value = t.number(key, 0)
    if value > 1 and uses_critic(t):
        t.write("nodes.update.critic_warmup", value - 1, key, note="steps before it, which verl counts from 1")
    else:
        t.imply("the policy learns from the first step on", key)


def _keep(t: Translation) -> None:
    keep(t, "trainer.max_actor_ckpt_to_keep")
    t.imply("a checkpoint holds all engines", "trainer.max_critic_ckpt_to_keep")


def _resume(t: Translation) -> None:
    mode = t.get("trainer.resume_mode")
    if mode == "disable":
        t.write("run.resume", "never", "trainer.resume_mode")
    elif mode in ("auto", None):
        t.imply("a run goes on in its folder by itself", "trainer.resume_mode")
    else:
        t.refuse("a run goes on in its own folder: `dagrl run --run-dir DIR`", "trainer.resume_mode")
    if t.get("trainer.resume_from_path") in (None, False):
        t.imply("a run goes on in its folder by itself", "trainer.resume_from_path")
    else:
        t.refuse("a run goes on in its own folder: `dagrl run --run-dir DIR`", "trainer.resume_from_path")


def _finish(t: Translation) -> None:
    put_node(t, "update", "update", "actor")


TRAINER_GROUPS = (
    named("trainer.experiment_name"),
    joint(_groups, "trainer.nnodes trainer.n_gpus_per_node", always=True),
)
TRAINER = (
    joint(_steps, "trainer.total_training_steps trainer.total_epochs", always=True),
    joint(_every, "trainer.save_freq trainer.test_freq trainer.val_before_train", always=True),
    joint(_val_only, "trainer.val_only"),
    joint(_warmup, "trainer.critic_warmup"),
    joint(_keep, "trainer.max_actor_ckpt_to_keep trainer.max_critic_ckpt_to_keep", always=True),
    joint(_resume, "trainer.resume_mode trainer.resume_from_path"),
    tracked("trainer.logger", project="trainer.project_name", name="trainer.experiment_name"),
    to("trainer.log_val_generations", "run.log_val_generations"),
    to("trainer.seed", "run.seed"),
    joint(_finish, always=True),
    refused_unless(("cuda", "gpu"), "GPUs are NVIDIA's", "trainer.device"),
    refused("checkpoints stay in the run folder", "trainer.default_hdfs_dir"),
    implied("is `dagrl run --run-dir DIR`", "trainer.default_local_dir"),
    implied(
        "is done by itself, or is part of the run folder",
        "trainer.balance_batch trainer.rollout_data_dir trainer.validation_data_dir "
        "trainer.del_local_ckpt_after_load trainer.ray_wait_register_center_timeout "
        "trainer.esi_redundant_time trainer.use_legacy_worker_impl *_target_ trainer.profile* ray_kwargs* "
        "global_profiler* transfer_queue* hydra* defaults* dag* --config-path",
    ),
)
