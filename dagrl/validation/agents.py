"""Checks of agents of rollouts: callable functions and commands, and consistent options."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from dagrl.config.errors import Place, listed, removal
from dagrl.config.loading.positions import Findings
from dagrl.config.schema import AgentSpec, Pipeline, RolloutNode, SandboxSpec
from dagrl.plugins.agent import NamedAgent
from dagrl.plugins.agent_python import problem_in
from dagrl.plugins.custom import UserFunction
from dagrl.plugins.isolation import ask

PYTHON = "python"
"""In place of a program: the Python of the worker."""
_KINDS = ("function", "environment", "command", "url")


def check_agent_of(pipeline: Pipeline, name: str, node: RolloutNode, folder: Path, findings: Findings) -> None:
    """Report an agent that cannot run; `folder` holds the user's modules and commands."""
    spec = node.agent_spec
    assert spec is not None
    place: Place = ("nodes", name, "agent")
    given = [kind for kind in _KINDS if getattr(spec, kind) is not None]
    if len(given) != 1:
        message = f"it has {listed(given) if given else 'no program'}; give it one of {', '.join(_KINDS)}"
        findings.error(place, message, "agent-without-program")
        return
    for key in ("args", "python"):
        if getattr(spec, key) and given[0] not in ("function", "environment"):
            findings.superfluous((*place, key), "has no effect without `function` or `environment`")
    for section, sampling in pipeline.samplings(name).items():
        if sampling.stop:
            findings.superfluous((*section, "stop"), "the agent names stop strings in its requests")
    if _check_sandbox(spec, (*place, "sandbox"), findings):
        _check_program(spec, place, folder, findings)
    if spec.timeout_s >= (silence := pipeline.run.node_timeout_s):
        message = f"a worker that waits for agents is silent, for at most run.node_timeout_s = {silence:g}; lower it"
        findings.error((*place, "timeout_s"), message, "agent-timeout-too-long")
    if spec.sequences > 1 and len(pipeline.rollouts) > 1:
        message = removal("all rollouts of a pipeline have the same rows, one for each sample")
        findings.error((*place, "sequences"), message, "several-rollouts")


def _check_program(spec: AgentSpec, place: Place, folder: Path, findings: Findings) -> None:
    if spec.function is not None or spec.environment is not None:
        if problem := _problem_of(spec, folder):
            key, message = problem
            findings.error((*place, key) if key else place, message, "invalid-agent")
    elif spec.command is not None and spec.sandbox is True:
        file = folder / spec.command[1] if spec.command[0] == PYTHON and len(spec.command) > 1 else None
        if file is None or not file.is_file():
            message = f"a sandbox runs `[python, FILE, ...]` with a file of {folder}; name such a file"
            findings.error((*place, "command"), message, "invalid-agent")
    elif spec.command is not None:
        program = spec.command[0]
        if which(program, folder) is None:
            findings.error((*place, "command"), no_program(program, folder), "invalid-agent")


def _check_sandbox(spec: AgentSpec, place: Place, findings: Findings) -> bool:
    """Whether the section agrees with itself and its agent."""
    problems: list[tuple[str, str]] = []
    if spec.url is not None and spec.sandbox:
        findings.superfluous(place, "has no effect on a service")
    elif spec.command is not None and isinstance(spec.sandbox, SandboxSpec):
        message = "a command is confined with `sandbox: true`; other sandboxes are for functions and environments"
        findings.error(place, message, "invalid-agent")
    elif (sandbox := spec.sandbox_spec) is not None:
        problems = [*_sandbox_problems(sandbox, spec.timeout_s)]
    for key, message in problems:
        findings.error((*place, key) if isinstance(spec.sandbox, SandboxSpec) else place, message, "invalid-sandbox")
    return not problems


def _sandbox_problems(sandbox: SandboxSpec, timeout_s: float) -> Iterator[tuple[str, str]]:
    """Keys of the section that its provider cannot follow, and the reasons."""
    provider = sandbox.provider
    if provider in ("docker", "kubernetes") and sandbox.image is None:
        yield "provider", f"{provider} starts containers; name their `image`, for example python:3.12-slim"
    if provider == "local" and sandbox.image is not None:
        yield "image", "local sandboxes have no image; remove it, or choose the provider docker"
    if provider == "local" and sandbox.network == sandbox.args.get("confined", True):
        yield (
            "network",
            "confined local sandboxes have no network, and others have one; set `args: {confined: false}` for both",
        )
    if sandbox.lifetime_s < 2 * timeout_s:
        why = "warm sandboxes wait before their episode"
        yield "lifetime_s", f"{why}; set it to at least twice the agent's timeout_s, {2 * timeout_s:g}"


def _problem_of(spec: AgentSpec, folder: Path) -> tuple[str | None, str] | None:
    agent = NamedAgent.of(spec, folder)
    if spec.python is not None:
        return problem_in(spec.python, agent)
    try:
        return ask(agent.place, _problem, agent, folder=folder)
    except ValueError as error:
        return None, str(error)


def _problem(loaded: UserFunction, agent: NamedAgent) -> tuple[str | None, str] | None:
    return agent.problem_of(loaded)


def no_program(program: str, folder: Path) -> str:
    """The message for a program that `which` does not find."""
    return f"there is no program `{program}` on the path or in {folder}; name an executable program"


def which(program: str, folder: Path) -> str | None:
    """The file of a program: on the path, or in `folder` if its name has a slash. None if there is none."""
    if program == PYTHON:
        return sys.executable
    return shutil.which(str(folder / program) if "/" in program else program)
