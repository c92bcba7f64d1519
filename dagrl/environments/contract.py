"""The interface of environments; `docs/environments.md` describes it to users."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

type Row = Mapping[str, Any]
"""A row of the data file: messages, answer, data_source, extra_info, and seed, sample_id and group_id of the sample."""


class Unscored:
    """The state of an episode, which is scored together with its group."""

    def __init__(self, state: object) -> None:
        self.state = state


class Environment(Protocol):
    """Tasks and how they are solved with a policy. Its constructor takes `agent.args`, and raises ValueError for wrong
    ones.

    Further methods are optional: ``rows()`` yields the tasks as rows of a data file, dicts with ``prompt`` (messages),
    ``answer``, ``data_source`` and ``extra_info``; ``async score(states)`` returns a result, as of `solve`, for each of
    the `Unscored` states of a group; ``async close()`` is called when the process ends in an orderly way.
    """

    requires: Sequence[str] = ()
    """Modules without which it cannot run."""

    async def solve(self, client: Any, row: Row) -> float | Mapping[str, float] | Unscored | None:
        """Solve the task of a row by asking the policy: `client` is an ``openai.AsyncOpenAI`` for this sample.

        Returns the reward, or a dict with ``reward`` and metrics. Where the package openai is missing, `client` has
        ``base_url`` and ``api_key`` only. Raises EnvironmentFailedError if a machine failed, not the policy.
        """
