"""Environments of the package verifiers as agents."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dagrl.plugins.custom import importable_from

type Result = dict[str, float]
type Solve = Callable[..., Awaitable[Result | Unscored]]
type Score = Callable[[Sequence[Any]], Awaitable[list[Result]]]


class Unscored:
    """The state of a rollout, which is scored with those of its group."""

    def __init__(self, state: Any) -> None:
        self.state = state


def verifiers_agent(name: str, args: Mapping[str, Any], folder: Path | None) -> tuple[Solve, Score]:
    """Two functions: of a client and a row, which runs the environment `name`, created with `args`; and of the states
    of a group, which returns the rubric's rewards and metrics.

    Raises ValueError if the environment cannot be loaded.
    """
    import verifiers
    from verifiers.errors import EmptyModelResponseError

    try:
        with importable_from(folder):
            environment = verifiers.load_environment(name, **args)
    except Exception as error:  # an environment may raise anything
        raise ValueError(f"the environment `{name}` of verifiers cannot be loaded: {error}") from error

    async def solve(client: Any, row: Mapping[str, Any]) -> Result | Unscored:
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
        return Unscored(state)

    async def score(states: Sequence[Any]) -> list[Result]:
        # As the library itself does: a rubric may compare the samples of a group.
        await environment.rubric.score_group([*states])
        return [{"reward": state["reward"], **state["metrics"]} for state in states]

    return solve, score
