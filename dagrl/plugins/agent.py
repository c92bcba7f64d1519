"""Agents in Python: async functions, and environments of other packages, that solve a row's task with a client.

A pipeline names a function as ``module:function``; an environment is one of `ENVIRONMENTS`, an entry point, or
``module:Class``.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from dagrl.config.errors import listed, suggest
from dagrl.plugins.custom import UserFunction, load_function

if TYPE_CHECKING:
    from dagrl.config.schema import AgentSpec

ENVIRONMENTS = {
    "harbor": "dagrl.environments.harbor:Harbor",
    "nemo_gym": "dagrl.environments.nemo_gym:NemoGym",
    "openenv": "dagrl.environments.openenv:OpenEnv",
    "verifiers": "dagrl.environments.verifiers:Verifiers",
}
"""Name -> class of the environments of `dagrl.environments`."""
_ENTRY_POINTS = "dagrl.environments"


@dataclass(frozen=True, slots=True)
class NamedAgent:
    """An agent in Python, as a pipeline names it."""

    function: str | None
    environment: str | None
    args: Mapping[str, object]
    folder: str | None
    """Folder of its modules."""

    @classmethod
    def of(cls, spec: AgentSpec, folder: Path | None) -> NamedAgent:
        return cls(spec.function, spec.environment, spec.args, None if folder is None else str(folder.absolute()))

    @property
    def name(self) -> str:
        return self.function or self.environment or ""

    def as_values(self) -> dict[str, object]:
        return asdict(self)

    @property
    def place(self) -> str:
        """``module:function`` or ``module:Class``. ValueError for an unknown environment."""
        return self.name if self.environment is None else _place_of(self.environment)

    def make_importable(self) -> None:
        """Let this process import the modules of the folder from now on: an environment may import some later."""
        if self.folder is not None:
            sys.path.insert(0, self.folder)

    def load(self) -> UserFunction:
        """The function, or the class of the environment. ValueError if it cannot be imported."""
        return load_function(self.place, None if self.folder is None else Path(self.folder))

    def problem_of(self, loaded: UserFunction) -> tuple[str | None, str] | None:
        """The wrong key of the section (None for the agent itself) and the reason, if it cannot be an agent."""
        return (agent_problem if self.environment is None else _environment_problem)(loaded, self.name, self.args)

    def problem(self) -> tuple[str | None, str] | None:
        """As `problem_of`, also if it cannot be loaded."""
        try:
            return self.problem_of(self.load())
        except ValueError as error:
            return None, str(error)


def agent_problem(function: UserFunction, place: str, args: Mapping[str, object]) -> tuple[str | None, str] | None:
    """The wrong key (None for the function itself) and the reason; None if the function can be an agent with `args`.

    An agent is async and takes a client and a row.
    """
    if not inspect.iscoroutinefunction(inspect.unwrap(function)):
        return None, f"the agent `{place}` is not declared with `async def`; it gets an async client"
    try:
        inspect.signature(function).bind(None, {}, **args)
    except TypeError as error:
        why = f"`{place}` cannot be called: {error}; an agent gets a client, the row and `args`"
        return "args" if args else None, why
    return None


def _place_of(environment: str) -> str:
    """The class of an environment: one of dagrl's, an entry point, or ``module:Class``. ValueError for another name."""
    if ":" in environment:
        return environment
    found = {point.name: point.value for point in entry_points(group=_ENTRY_POINTS)} | ENVIRONMENTS
    if environment not in found:
        known = suggest(environment, found)
        raise ValueError(f"there is no environment `{environment}`; {known}, or name your own as `module:Class`")
    return found[environment]


def _environment_problem(made: UserFunction, place: str, args: Mapping[str, object]) -> tuple[str | None, str] | None:
    """As `agent_problem`, for the class of an environment. It is not constructed, because that may take long."""
    missing = [module for module in getattr(made, "requires", ()) if find_spec(module) is None]
    if missing:
        return (
            "python",
            f"this Python lacks {listed(missing)}, which `{place}` needs; install it, or name another `python`",
        )
    if not inspect.isclass(made) or not inspect.iscoroutinefunction(getattr(made, "solve", None)):
        return None, f"`{place}` is no environment; name a class with `async def solve(self, client, row)`"
    try:
        inspect.signature(made).bind(**args)
    except TypeError as error:
        return "args", f"`{place}` cannot be made with them: {error}; its constructor gets `args`"
    return None
