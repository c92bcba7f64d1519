"""dagrl: a DAG-based pipeline orchestrator for multi-node reinforcement learning of language models."""

from dagrl.api import PipelineHandle, RunFailedError, RunResult, load
from dagrl.config.errors import PipelineError
from dagrl.plugins.declarations import estimator, loss, node, reward
from dagrl.plugins.environment import Observation
from dagrl.plugins.tool import ToolUnavailableError, tool
from dagrl.version import __version__

__all__ = [
    "Observation",
    "PipelineError",
    "PipelineHandle",
    "RunFailedError",
    "RunResult",
    "ToolUnavailableError",
    "__version__",
    "estimator",
    "load",
    "loss",
    "node",
    "reward",
    "tool",
]
