"""Agents in Python: async functions, and environments of other packages, that solve a row's task with a client.

A pipeline names a function as ``module:function``; an environment is one of `ENVIRONMENTS`, an entry point, or
``module:Class``.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
_CLIENTS = {"docker": "aiodocker", "kubernetes": "kubernetes"}
"""Provider of sandboxes -> the package that it needs."""


@dataclass(frozen=True, slots=True)
class NamedAgent:
    """An agent in Python, as a pipeline names it."""

    function: str | None
    environment: str | None
    args: Mapping[str, object]
    folder: str | None
    """Folder of its modules."""
    sandbox: Mapping[str, Any] | None = None
    """Its section `sandbox`, and in a process the ``label`` of the process's sandboxes."""

    @classmethod
    def of(cls, spec: AgentSpec, folder: Path | None) -> NamedAgent:
        sandbox = None if spec.sandbox_spec is None else spec.sandbox_spec.model_dump(mode="json")
        place = None if folder is None else str(folder.absolute())
        return cls(spec.function, spec.environment, spec.args, place, sandbox)

    def in_process(self, label: str, count: int) -> NamedAgent:
        """The agent in one of `count` processes, with its share of the worker's sandboxes."""
        if self.sandbox is None:
            return self
        shares = {name: -(-self.sandbox[name] // count) for name in ("warm", "starting")}
        return replace(self, sandbox={**self.sandbox, **shares, "label": label})

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
        check = agent_problem if self.environment is None else _environment_problem
        problem = check(loaded, self.name, self.args, self.sandbox is not None)
        if problem or self.sandbox is None:
            return problem
        return _provider_problem(self.sandbox["provider"], self.folder)

    def problem(self) -> tuple[str | None, str] | None:
        """As `problem_of`, also if it cannot be loaded."""
        try:
            return self.problem_of(self.load())
        except ValueError as error:
            return None, str(error)


def agent_problem(
    function: UserFunction, place: str, args: Mapping[str, object], sandbox: bool = False
) -> tuple[str | None, str] | None:
    """The wrong key (None for the function itself) and the reason; None if the function can be an agent with `args`.

    An agent is async and takes a client and a row, and the keyword `sandbox` if it gets one.
    """
    if not inspect.iscoroutinefunction(inspect.unwrap(function)):
        return None, f"the agent `{place}` is not declared with `async def`; it gets an async client"
    if sandbox and (problem := _sandbox_problem(function, place)):
        return problem
    try:
        inspect.signature(function).bind(None, {}, **args, **({"sandbox": None} if sandbox else {}))
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


def _sandbox_problem(solve: UserFunction, place: str) -> tuple[str, str] | None:
    parameters = inspect.signature(solve).parameters
    if "sandbox" in parameters or any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
        return None
    return "sandbox", f"`{place}` takes no keyword `sandbox`; add it, or remove the section"


def _provider_problem(provider: str, folder: str | None) -> tuple[str, str] | None:
    """Whether this Python has what a provider of sandboxes needs."""
    package = _CLIENTS.get(provider)
    if package is not None and find_spec(package) is None:
        return "sandbox", f"this Python lacks {package}, which the provider {provider} needs; install it there"
    if ":" in provider:
        try:
            load_function(provider, None if folder is None else Path(folder))
        except ValueError as error:
            return "sandbox", str(error)
    return None


def _environment_problem(
    made: UserFunction, place: str, args: Mapping[str, object], sandbox: bool
) -> tuple[str | None, str] | None:
    """As `agent_problem`, for the class of an environment. It is not constructed, because that may take long."""
    missing = [module for module in getattr(made, "requires", ()) if find_spec(module) is None]
    if missing:
        return (
            "python",
            f"this Python lacks {listed(missing)}, which `{place}` needs; install it, or name another `python`",
        )
    solve = getattr(made, "solve", None)
    if not inspect.isclass(made) or solve is None or not inspect.iscoroutinefunction(solve):
        return None, f"`{place}` is no environment; name a class with `async def solve(self, client, row)`"
    if sandbox and (problem := _sandbox_problem(solve, f"{place}.solve")):
        return problem
    try:
        inspect.signature(made).bind(**args)
    except TypeError as error:
        return "args", f"`{place}` cannot be made with them: {error}; its constructor gets `args`"
    return None
