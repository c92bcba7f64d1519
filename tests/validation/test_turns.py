"""Tools and environments of rollouts: whether they are there, and what contradicts them."""

from __future__ import annotations

import sys
from importlib import metadata

import pytest

from dagrl.validation import check_file

ROLLOUT = "n: 4, sampling: {max_new_tokens: 8}}"
MODULE = '''
import dagrl

@dagrl.tool
def search(query: str, *, url: str) -> str:
    """Looks something up."""

@dagrl.tool
def calculator(expression: str) -> str:
    """Another one."""

def plain(query: str) -> str:
    """Not declared."""

@dagrl.tool
def untyped(query) -> str:
    """Without a hint."""

def parse(text):
    return []

class Game:
    def __init__(self, size=3): ...
    def reset(self, extra_info, seed): ...
    def step(self, response): ...

class Mute:
    def reset(self): ...

class Curious:
    def reset(self, weather): ...
    def step(self, response): ...
'''
CASES = {
    "no such tool": ("tools: [calculater]", "tools[0]", "invalid-tool", "did you mean `calculator`?"),
    "no such module": ("tools: ['nowhere:search']", "tools[0]", "invalid-tool"),
    "not declared": ("tools: ['own:plain']", "tools[0]", "invalid-tool", "@dagrl.tool"),
    "not set": ("tools: ['own:search']", "tools[0]", "invalid-tool", "set it in `tool_args`"),
    "no hint": ("tools: ['own:untyped']", "tools[0]", "invalid-tool", "give it a type hint"),
    "twice": ("tools: [calculator, 'own:calculator']", "tools[1]", "duplicate-tool"),
    "args of nobody": (
        "tools: [calculator], tool_args: {calcuator: {}}",
        "tool_args.calcuator",
        "unknown-tool",
        "did you mean `calculator`?",
    ),
    "the policy's": (
        "tools: [calculator], tool_args: {calculator: {expression: '1'}}",
        "tools[0]",
        "invalid-tool",
        "cannot be set by `tool_args` of the tool",
    ),
    "no such argument": (
        "tools: [python], tool_args: {python: {memory_mb: 3}}",
        "tools[0]",
        "invalid-tool",
        "did you mean `memory_mib`?",
    ),
    "no such format": (
        "tools: [calculator], tool_format: hermesse",
        "tool_format",
        "invalid-tool-format",
        "did you mean `hermes`?",
    ),
    "no such parser": ("tools: [calculator], tool_format: 'own:pars'", "tool_format", "invalid-tool-format"),
    "nobody answers": ("max_turns: 3", "max_turns", "turns-without-tools"),
    "no class": ("environment: 'own:parse'", "environment", "invalid-environment"),
    "no step": ("environment: 'own:Mute'", "environment", "invalid-environment"),
    "a wish": ("environment: 'own:Curious'", "environment", "invalid-environment"),
    "other arguments": (
        "environment: 'own:Game', environment_args: {width: 3}",
        "environment",
        "invalid-environment",
    ),
    "longer than a sign of life": (
        "tools: [calculator], tool_timeout_s: 1800",
        "tool_timeout_s",
        "tool-timeout-too-long",
    ),
}


@pytest.fixture(autouse=True)
def _own_module(project) -> None:
    project.write("own.py", MODULE)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_unworkable_pipelines_are_refused(project, case) -> None:
    options, key, *fragments = case
    path = project.pipeline((ROLLOUT, f"{ROLLOUT[:-1]}, {options}}} #!"))
    project.assert_problem(path, f"nodes.rollout.{key}", *fragments)


@pytest.mark.parametrize(
    "options",
    [
        "tools: [calculator, python, 'own:search'], tool_args: {search: {url: here}, python: {timeout_s: 3}}",
        "tools: [calculator], tool_format: llama3, max_turns: 2, max_parallel_calls: 1",
        "tools: [calculator], tool_format: 'own:parse', environment: 'own:Game', environment_args: {size: 4}",
    ],
)
def test_workable_pipelines_pass(project, options: str) -> None:
    path = project.pipeline((ROLLOUT, f"{ROLLOUT[:-1]}, {options}}}"))
    assert check_file(path, ["model.tokenizer={kind: bytes}"]).warnings == ()


def test_an_environments_reward_needs_an_environment(project) -> None:
    edit = ("reward: {op: reward, fn: exact}", "reward: {op: reward, fn: environment} #!")
    project.assert_problem(
        project.pipeline(edit),
        "nodes.reward",
        "missing-column",
        "environment: ...",
    )
    check_file(project.pipeline(edit, (ROLLOUT, f"{ROLLOUT[:-1]}, environment: 'own:Game'}}")))


RENAMED = (
    "write: {response_tokens: said, response_mask: b, rollout_logprob: c, policy_version: d, finish_reason: e, "
    "routed_experts: f}"
)


def test_no_node_reads_the_turns_of_another_rollout(project) -> None:
    other = f"  other: {{op: rollout, engine: generator, n: 4, sampling: {{max_new_tokens: 8}}, {RENAMED}}}\n"
    judged = "  judged: {op: reward, fn: exact, read: {response_tokens: said}, write: judgement}\n"
    leading = (ROLLOUT, f"{ROLLOUT[:-1]}, tools: [calculator]}}")
    path = project.pipeline(leading, ("  ref: {op", f"{other}{judged}  ref: {{op"))
    # The prompts are the same, and the other rollout is told of tools that it does not have.
    assert project.only_problem(path).place == "nodes.other.tools"
    path.write_text(path.read_text().replace("other: {op: rollout,", "other: {op: rollout, tools: [calculator],"))
    path.write_text(path.read_text().replace("routed_experts: f}", "routed_experts: f, turns: g, token_turn: h}"))
    nodes = check_file(path).graph.nodes
    assert nodes["reward"].inputs["token_turn"].node == "rollout"
    assert "token_turn" not in nodes["judged"].inputs


def test_rollouts_that_share_prompts_share_tools(project) -> None:
    other = "other: {op: rollout, engine: generator, n: 4, sampling: {max_new_tokens: 8}, tools: [python], "
    other += RENAMED[:-1] + ", turns: g, token_turn: h}}\n"
    judged = "  judged: {op: reward, fn: exact, read: {response_tokens: said}, write: judgement}\n"
    path = project.pipeline(("  ref: {op", f"  {other}{judged}  ref: {{op"))
    problem = project.only_problem(path)
    assert (problem.place, problem.code) == ("nodes.other.tools", "different-tools")


def test_a_format_that_the_generators_environment_lacks_is_refused(project) -> None:
    (project.folder / "env" / "bin").mkdir(parents=True)
    (project.folder / "env" / "bin" / "python").touch()
    site = project.folder / "env" / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    (site / "transformers").mkdir(parents=True)
    for name in ("ray", "dagrl"):
        (site / f"{name}.dist-info").mkdir()
        text = f"Name: {name}\nVersion: {metadata.version(name)}\n"
        (site / f"{name}.dist-info" / "METADATA").write_text(text)
    generator = "  generator: {backend: hf, group: rollout, weights_from: actor}"
    path = project.pipeline(
        (ROLLOUT, f"{ROLLOUT[:-1]}, tools: [calculator], tool_format: llama3}} #!"),
        (generator, f"{generator[:-1]}, environment: ./env}}"),
    )
    project.assert_problem(path, "nodes.rollout.tool_format", "invalid-tool-format", "there is no format `llama3`")


HERMES = "0123456789+=" + "".join(sorted(set('<tool_call>{"name": "calculator", "arguments": {}}</tool_call>')))
