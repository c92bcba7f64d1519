"""slime: arguments of ``train.py`` and ``train_async.py``, including Megatron-LM's and SGLang's."""

from __future__ import annotations

from dagrl.importing import finishing
from dagrl.importing.slime import engines, nodes
from dagrl.importing.table import Framework

_DEFAULTS = {
    "--actor-num-nodes": 1,
    "--actor-num-gpus-per-node": 8,
    "--num-gpus-per-node": 8,
    "--rollout-num-gpus-per-engine": 1,
    "--n-samples-per-prompt": 1,
    "--input-key": "input",
    "--advantage-estimator": "grpo",
    "--eps-clip": 0.2,
    "--kl-loss-type": "k1",
    "--kl-loss-coef": 0.0,
    "--kl-coef": 0.0,
    "--entropy-coef": 0.0,
    "--opd-kl-coef": 1.0,
    "--value-clip": 0.2,
    "--tis-clip": 2.0,
    "--lr": 1.0e-6,
    "--lr-decay-style": "linear",
    "--weight-decay": 0.01,
    "--rollout-shuffle": False,
    "--calculate-per-token-loss": False,
}
_RULES = (
    *engines.CLUSTER,
    *nodes.DATA,
    nodes.steps,
    *nodes.ROLLOUT,
    engines.mini_batch,
    *nodes.RUN,
    *engines.MEGATRON,
    *nodes.ALGORITHM,
    engines.micro_batches,
    nodes.correction,
    nodes.distillation,
    nodes.reward,
    *engines.MODEL,
    *nodes.REST,
    finishing.finish,
)
SLIME = Framework("slime", "slime", _RULES, _DEFAULTS, program=r"train(_async)?\.py")
