"""dagrl: a DAG-based pipeline orchestrator for multi-node reinforcement learning of language models."""

from dagrl.spec.own.custom import node, reward
from dagrl.spec.own.environment import Observation
from dagrl.spec.own.formulas import estimator, loss
from dagrl.spec.own.tool import ToolUnavailableError, tool

__version__ = "0.1.0"
__all__ = ["Observation", "ToolUnavailableError", "__version__", "estimator", "loss", "node", "reward", "tool"]
