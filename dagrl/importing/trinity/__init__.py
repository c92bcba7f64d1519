"""Trinity-RFT: its YAML. Each of its steps is one optimizer step; weights are synced every ``sync_interval`` steps."""

from __future__ import annotations

from dagrl.importing import finishing
from dagrl.importing.table import Framework
from dagrl.importing.trinity import algorithm, engines, nodes

_DEFAULTS = {
    "mode": "both",
    "name": "rft",
    "algorithm.algorithm_type": "ppo",
    "algorithm.optimizer.lr": 1.0e-6,
    "algorithm.optimizer.weight_decay": 0.01,
    "algorithm.optimizer.min_lr_ratio": 0.01,
    "algorithm.bypass_old_logprobs": True,
    "buffer.batch_size": 1,
    "buffer.total_epochs": 1,
    "cluster.node_num": 1,
    "cluster.gpu_per_node": 8,
    "explorer.rollout_model.engine_type": "vllm",
    "explorer.rollout_model.engine_num": 1,
    "explorer.rollout_model.tensor_parallel_size": 1,
    "explorer.rollout_model.gpu_memory_utilization": 0.9,
    "explorer.eval_interval": 100,
    "explorer.eval_on_startup": True,
    "synchronizer.sync_interval": 1,
    "synchronizer.sync_offset": 0,
    "trainer.grad_clip": 1.0,
    "trainer.ulysses_sequence_parallel_size": 1,
    "monitor.monitor_type": "tensorboard",
}
_RULES = (
    *engines.CLUSTER,
    nodes.lengths,
    nodes.data,
    nodes.batches,
    *nodes.RUN,
    nodes.rollout_sampling,
    nodes.server_options,
    nodes.over_rollout,
    *engines.OPTIMIZER,
    *algorithm.ALGORITHM,
    *engines.TRAINER,
    *algorithm.REWARD,
    nodes.replay,
    *algorithm.REST,
    finishing.finish,
)
TRINITY = Framework("trinity", "Trinity-RFT 0.6", _RULES, _DEFAULTS, sections=("explorer", "synchronizer", "buffer"))
