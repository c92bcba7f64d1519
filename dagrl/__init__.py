"""dagrl: a DAG-based pipeline orchestrator for multi-node reinforcement learning of language models."""

from dagrl.graph.plugins.declarations import estimator, loss, node, reward
from dagrl.graph.plugins.environment import Observation
from dagrl.graph.plugins.tool import ToolUnavailableError, tool

__version__ = "0.1.0"
__all__ = ["Observation", "ToolUnavailableError", "__version__", "estimator", "loss", "node", "reward", "tool"]
