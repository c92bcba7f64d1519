"""dagrl: a DAG-based pipeline orchestrator for multi-node reinforcement learning of language models."""

from dagrl.spec.custom import node, reward
from dagrl.spec.environment import Observation
from dagrl.spec.formulas import estimator, loss
from dagrl.spec.tool import ToolUnavailableError, tool

__version__ = "0.1.0"
__all__ = ["Observation", "ToolUnavailableError", "__version__", "estimator", "loss", "node", "reward", "tool"]
