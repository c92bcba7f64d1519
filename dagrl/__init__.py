"""dagrl: a DAG-based pipeline orchestrator for multi-node reinforcement learning of language models."""

from dagrl.spec.custom import node, reward
from dagrl.spec.formulas import estimator, loss

__version__ = "0.1.0"
__all__ = ["__version__", "estimator", "loss", "node", "reward"]
