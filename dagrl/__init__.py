"""dagrl: a DAG-based pipeline orchestrator for multi-node reinforcement learning of language models."""

from dagrl.spec.custom import node, reward

__version__ = "0.1.0"
__all__ = ["__version__", "node", "reward"]
