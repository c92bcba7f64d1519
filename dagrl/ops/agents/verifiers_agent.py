"""Environments of the package verifiers as agents."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from dagrl.graph.plugins.custom import importable_from

type Solve = Callable[..., Awaitable[dict[str, float]]]


def verifiers_agent(name: str, args: Mapping[str, Any], folder: Path | None) -> Solve:
    """A function of a client and a row that runs the environment `name`, which is created with `args`.

    Returns the rubric's reward and metrics. Raises ValueError if the environment cannot be loaded.
    """
    import verifiers
    from verifiers.errors import EmptyModelResponseError

    try:
        with importable_from(folder):
            environment = verifiers.load_environment(name, **args)
    except Exception as error:  # an environment may raise anything
        raise ValueError(f"the environment `{name}` of verifiers cannot be loaded: {error}") from error

    async def solve(client: Any, row: Mapping[str, Any]) -> dict[str, float]:
        task = {
            "prompt": row["messages"],
            "answer": row["answer"],
            "info": row["extra_info"],
            "example_id": row["sample_id"],
            "task": name,
        }
        state = await environment.rollout(task, client, "policy", {})
        if isinstance(state["error"], EmptyModelResponseError):
            # The policy's failure, and not the environment's.
            return {"reward": 0.0}
        if state["error"] is not None:
            raise RuntimeError(f"the environment failed: {state['error']!r}")
        await environment.rubric.score_rollout(state)
        return {"reward": state["reward"], **state["metrics"]}

    return solve
