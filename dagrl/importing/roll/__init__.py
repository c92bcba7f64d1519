"""ROLL: the YAML of an RLVR pipeline."""

from __future__ import annotations

from dagrl.importing import finishing
from dagrl.importing.roll import algorithm, distillation, engines, nodes
from dagrl.importing.table import Framework

_DEFAULTS = {
    "exp_name": "roll",
    "num_gpus_per_node": 8,
    "rollout_batch_size": 128,
    "prompt_length": 1024,
    "num_return_sequences_in_group": 1,
    "max_steps": 500,
    "save_steps": 50,
    "eval_steps": 10,
    "track_with": "tensorboard",
    "adv_estimator": "gae",
    "gamma": 1,
    "lambd": 0.95,
    "pg_clip": 0.2,
    "pg_clip_low": 0.2,
    "pg_clip_high": 0.2,
    "kl_penalty": "kl",
    "init_kl_coef": 0.2,
    "kl_horizon": 10000,
    "kl_loss_coef": 0,
    "entropy_loss_coef": 0,
    "loss_agg_mode": "seq-mean-token-mean",
    "max_grad_norm": 1.0,
    "train_infer_correction.is_weight.upper_bound": 1.2,
    "train_infer_correction.is_weight.weight_type": "token",
}
_STUDENT = {"student_train.": "actor_train.", "student_infer.": "actor_infer."}
"""Names of the roles if a teacher is the only source of learning."""
_RULES = (
    *engines.CLUSTER,
    *nodes.DATA,
    *nodes.ROLLOUT,
    *engines.TRAINER,
    *engines.BATCHES,
    engines.optimizer,
    *algorithm.ALGORITHM,
    *engines.BATCHES_TOKENS,
    algorithm.correction,
    algorithm.reward,
    distillation.teachers,
    *nodes.RUN,
    *engines.TRAINER_MODEL,
    *algorithm.REST,
    finishing.finish,
)
ROLL = Framework(
    "roll", "ROLL", _RULES, _DEFAULTS, sections=("actor_train", "actor_infer", "rollout_batch_size"), aliases=_STUDENT
)
