"""Agents of rollouts: whether their programs are there, and what contradicts them."""

from __future__ import annotations

import sys

import pytest

from dagrl.validation import check_file

ROLLOUT = "n: 4, sampling: {max_new_tokens: 8}}"
MODULE = """
async def solve(client, row, *, depth=1): ...

def blocks(client, row): ...

async def alone(): ...

async def works(client, row, *, sandbox): ...

class Provider:
    def __init__(self, label): ...

class Words:
    def __init__(self, depth=1): ...

    async def solve(self, client, row): ...

class Rare(Words):
    requires = ("rare_package",)
"""
CASES = {
    "no program": ("agent: {timeout_s: 3}", "agent", "agent-without-program", "function, environment, command, url"),
    "two programs": ("agent: {command: [python], url: 'http://x'}", "agent", "agent-without-program"),
    "no such module": ("agent: 'nowhere:solve'", "agent", "invalid-agent", "nowhere"),
    "no such function": ("agent: 'own:solved'", "agent", "invalid-agent", "solve"),
    "not async": ("agent: 'own:blocks'", "agent", "invalid-agent", "async def"),
    "takes nothing": ("agent: 'own:alone'", "agent", "invalid-agent", "gets a client, the row"),
    "unknown argument": (
        "agent: {function: 'own:solve', args: {deep: 1}}",
        "agent.args",
        "invalid-agent",
        "deep",
    ),
    "no such command": ("agent: {command: [solve-it-all]}", "agent.command", "invalid-agent", "solve-it-all"),
    "a sandbox of another program": (
        "agent: {command: [bash, own.py], sandbox: true}",
        "agent.command",
        "invalid-agent",
        "[python, FILE, ...]",
    ),
    "no file for the sandbox": (
        "agent: {command: [python, other.py], sandbox: true}",
        "agent.command",
        "invalid-agent",
    ),
    "no such provider": (
        "agent: {function: 'own:works', sandbox: {provider: dokcer}}",
        "agent.sandbox.provider",
        "unknown-option",
        "did you mean `docker`",
    ),
    "no such provider of one's own": (
        "agent: {function: 'own:works', sandbox: {provider: 'own:Provides'}}",
        "agent.sandbox",
        "invalid-agent",
        "Provides",
    ),
    "no keyword for a sandbox": (
        "agent: {function: 'own:solve', sandbox: true}",
        "agent.sandbox",
        "invalid-agent",
        "keyword `sandbox`",
    ),
    "nor of an environment": ("agent: {environment: 'own:Words', sandbox: true}", "agent.sandbox", "invalid-agent"),
    "no image": (
        "agent: {function: 'own:works', sandbox: {provider: docker}}",
        "agent.sandbox.provider",
        "invalid-sandbox",
        "python:3.12-slim",
    ),
    "an image of no container": (
        "agent: {function: 'own:works', sandbox: {image: busybox}}",
        "agent.sandbox.image",
        "invalid-sandbox",
        "docker",
    ),
    "a confined network": (
        "agent: {function: 'own:works', sandbox: {network: true}}",
        "agent.sandbox.network",
        "invalid-sandbox",
        "confined: false",
    ),
    "a short life": (
        "agent: {function: 'own:works', timeout_s: 60, sandbox: {lifetime_s: 90}}",
        "agent.sandbox.lifetime_s",
        "invalid-sandbox",
        "120",
    ),
    "a sandbox of a provider for a command": (
        "agent: {command: [python], sandbox: {provider: local}}",
        "agent.sandbox",
        "invalid-agent",
        "functions",
    ),
    "a sandbox of a service": ("agent: {url: 'http://x', sandbox: true}", "agent.sandbox", "option-without-effect"),
    "not for functions": ("agent: {function: 'own:solve', env: {A: '1'}}", "agent.env", "option-without-effect"),
    "no such environment": ("agent: {environment: wordle}", "agent", "invalid-agent", "no environment `wordle`"),
    "no class": ("agent: {environment: 'own:solve'}", "agent", "invalid-agent", "async def solve"),
    "wrong arguments of it": (
        "agent: {environment: 'own:Words', args: {deep: 1}}",
        "agent.args",
        "invalid-agent",
        "deep",
    ),
    "a package is missing": (
        "agent: {environment: 'own:Rare'}",
        "agent.python",
        "invalid-agent",
        "lacks `rare_package`",
    ),
    "no such Python": (
        "agent: {environment: 'own:Words', python: envs/bin/python}",
        "agent.python",
        "invalid-agent",
        "envs/bin/python does not exist",
    ),
    "a folder for a Python": (
        "agent: {function: 'own:solve', python: .}",
        "agent.python",
        "invalid-agent",
        "is a folder; name its Python",
    ),
    "no Python": (
        "agent: {function: 'own:solve', python: not_python}",
        "agent.python",
        "invalid-agent",
        "not_python cannot run own:solve: I am no Python",
    ),
    "no arguments of services": (
        "agent: {url: 'http://x', args: {a: 1}}",
        "agent.args",
        "option-without-effect",
        "`function` or `environment`",
    ),
    "tools beside": ("agent: 'own:solve', tools: [calculator]", "tools", "option-without-effect"),
    "the length of a turn": ("agent: 'own:solve', max_turn_tokens: 5", "max_turn_tokens", "option-without-effect"),
    "stop strings": (
        "agent: 'own:solve', val_sampling: {max_new_tokens: 8, stop: [x]}",
        "val_sampling.stop",
        "option-without-effect",
    ),
    "too patient": (
        "agent: {function: 'own:solve', timeout_s: 100000}",
        "agent.timeout_s",
        "agent-timeout-too-long",
        "run.node_timeout_s",
    ),
    "unknown format": ("agent: 'own:solve', tool_format: hermess", "tool_format", "invalid-tool-format", "hermes"),
    "a server without a command": ("mcp_servers: {a: {}}", "mcp_servers.a", "server-without-command", "`url`"),
    "no such server": ("mcp_servers: {a: {command: [nowhere]}}", "mcp_servers.a.command", "invalid-command", "nowhere"),
}


@pytest.fixture(autouse=True)
def _own_module(project) -> None:
    project.write("own.py", MODULE)
    project.write("not_python", "#!/bin/sh\necho I am no Python >&2; exit 1\n").chmod(0o755)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_agents_that_cannot_run_are_refused(project, case) -> None:
    options, key, *fragments = case
    path = project.pipeline((ROLLOUT, f"{ROLLOUT[:-1]}, {options}}} #!"))
    project.assert_problem(path, f"nodes.rollout.{key}", *fragments)


@pytest.mark.parametrize(
    "options",
    [
        "agent: 'own:solve'",
        "agent: {function: 'own:solve', args: {depth: 2}, sequences: 3, retries: 2, on_error: zero}",
        "agent: {command: [python, own.py], sandbox: true, env: {A: '1'}}",
        "agent: {url: 'http://agents:9000/solve', listen: node}, tool_format: hermes, max_turns: 99",
        "agent: {environment: 'own:Words', args: {depth: 3}}",
        f"agent: {{function: 'own:solve', python: {sys.executable}}}",
        "mcp_servers: {a: {command: [python, own.py], tools: [search]}, b: {url: 'http://x/mcp'}}",
    ],
)
def test_agents_that_can_run_pass(project, options: str) -> None:
    path = project.pipeline((ROLLOUT, f"{ROLLOUT[:-1]}, {options}}}"))
    assert check_file(path, ["model.tokenizer={kind: bytes}"]).warnings == ()


@pytest.mark.parametrize(
    ("advantage", "place"),
    [
        ("estimator: gigpo", "estimator"),
        ("estimator: gae, lam: 0.95", "estimator"),
        ("estimator: gae, lam_value: 0.95", "estimator"),
        ("estimator: gae, length_adaptive_alpha: 0.05", "estimator"),
        ("estimator: optimal_token_baseline", "estimator"),
        ("estimator: agentic_reinforce", "estimator"),
        ("estimator: gae, kl_in_reward: {coef: 0.1}", "kl_in_reward"),
        ("estimator: reinforce_plus_plus, kl_in_reward: {coef: 0.1}", "kl_in_reward"),
        ("estimator: none, distillation: {discount: 0.5}", "distillation.discount"),
        ("estimator: none, distillation: {early_weight: 0.5}", "distillation.early_weight"),
    ],
)
def test_order_dependent_estimators_are_refused_with_several_rows(project, advantage: str, place: str) -> None:
    path = project.pipeline(
        (ROLLOUT, f"{ROLLOUT[:-1]}, agent: {{function: 'own:solve', sequences: 2}}}}"), ("estimator: grpo", advantage)
    )
    found = [(problem.place, problem.code) for problem in project.problems(path)]
    assert (f"nodes.advantage.{place}", "turns-in-several-rows") in found


def test_an_agents_reward_needs_an_agent(project) -> None:
    edit = ("reward: {op: reward, fn: exact}", "reward: {op: reward, fn: agent} #!")
    project.assert_problem(project.pipeline(edit), "nodes.reward", "missing-column", "agent: ...")
    check_file(project.pipeline(edit, (ROLLOUT, f"{ROLLOUT[:-1]}, agent: 'own:solve'}}")))
