"""`rollout`: samples responses, in turns with tools or an environment."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from dagrl.config.capability import Capability
from dagrl.config.schema.engine import EngineSpec
from dagrl.config.schema.nodes.base import TURN_COLUMNS, NodeBase, OpContract
from dagrl.config.schema.sampling import SamplingSpec
from dagrl.config.schema.sandbox import SandboxSpec
from dagrl.config.schema.section import (
    Coefficient,
    Concurrency,
    Name,
    OwnFunction,
    PositiveInt,
    Responses,
    Seconds,
    Section,
    Tokens,
)
from dagrl.environments.failures import FailureClass

AGENT_COLUMNS = ("excluded", "agent_reward", "agent_output", "trajectory_share")
"""Columns of a rollout with an agent, beside the columns of turns; the last one only with several rows of a
trajectory."""
ROLLOUT_WRITES = (
    "response_tokens",
    "response_mask",
    "rollout_logprob",
    "policy_version",
    "finish_reason",
    "routed_experts",
)
"""Columns of a rollout; the last one only if the engine reports it."""


class McpServerSpec(Section):
    """A server of the Model Context Protocol: a `command` that each worker starts, or a `url`."""

    command: Annotated[tuple[str, ...], Field(min_length=1)] | None = None
    """A program (``python``: the worker's) and its arguments, with the protocol on its standard input and output;
    started in the folder of the pipeline file."""
    env: dict[str, str] = Field(default_factory=dict)
    """Further variables of the command's environment, which inherits few of the worker's."""
    url: Annotated[str, Field(pattern=r"^https?://")] | None = None
    """A server that is running already, over streamable HTTP."""
    tools: Annotated[tuple[str, ...], Field(min_length=1)] | None = None
    """Names of the offered tools. Default: all tools of the server."""


_Retries = Annotated[int, Field(ge=0, le=100)]
_Treatment = Literal["mask", "zero", "stop"]


class AgentSpec(Section):
    """A program that calls the policy through an OpenAI endpoint: a `function`, an `environment`, a `command`
    or a service at a `url`.

    The function alone may stand in place of the section, ``agent: "module:function"``. See `docs/gateway.md`.
    """

    function: OwnFunction | None = None
    """An async function, ``module:function``, of an `openai.AsyncOpenAI` client and the row."""
    args: dict[str, object] = Field(default_factory=dict)
    """Further keyword arguments of the function, or those of the environment's constructor."""
    environment: Annotated[str, Field(pattern=r"^[A-Za-z_][\w-]*$|^[\w.]+:\w+$")] | None = None
    """An environment of another package: ``verifiers``, an entry point of the group ``dagrl.environments``, or your own
    class, ``module:Class``. See `docs/environments.md`."""
    python: Path | None = None
    """The Python that runs the function or the environment, such as ``envs/openenv/bin/python``; it needs that code's
    packages, not dagrl's. Default: the worker's."""
    command: Annotated[tuple[str, ...], Field(min_length=1)] | None = None
    """A program (``python``: the worker's) and its arguments, started for each sample in the folder of the pipeline
    file, with ``OPENAI_BASE_URL`` and ``OPENAI_API_KEY`` in its environment and the row as JSON on its standard
    input."""
    env: dict[str, str] = Field(default_factory=dict)
    """Further variables of the command's environment, which inherits few of the worker's."""
    sandbox: bool | SandboxSpec = False
    """A sandbox for each episode of a function or environment, which takes it as the keyword `sandbox`; true for a
    local one. With true, a command ``[python, FILE, ...]`` is confined as the policy's code is: it sees a copy of that
    file, an empty folder and Python's packages, starts no processes, and connects to nothing but the endpoint's port,
    on any host: Linux confines programs to ports, not to addresses."""
    url: Annotated[str, Field(pattern=r"^https?://")] | None = None
    """A service that receives ``base_url``, ``api_key`` and ``row`` by POST, and answers with ``reward``."""
    listen: Literal["loopback", "node"] = "loopback"
    """Address of the endpoint: the local host, or the machine's address, for services on other machines."""
    timeout_s: Seconds = 600.0
    """Timeout of the program for a sample, in seconds."""
    concurrency: Concurrency | None = None
    """Programs at a time, on each worker that samples; there may be more than the engine's concurrent requests.
    Default: 1024, or 128 if each is a process."""
    retries: _Retries | dict[FailureClass, _Retries] = 0
    """Retries of a program that fails, with the same random draws of the policy; also for some classes of failures
    alone, for example ``{network: 5, start: 3}``."""
    on_error: _Treatment | dict[FailureClass, _Treatment] = "mask"
    """If all retries fail: exclude the sample from losses and baselines, give it the reward 0, or stop the run. Also
    by classes of failures, for example ``{program: zero, grader: stop}``; the others have the default."""
    sequences: Annotated[int, Field(ge=1, le=64)] = 1
    """Most rows of a trajectory: conversations that do not continue each other are separate rows in training."""

    def retries_of(self, failure: FailureClass) -> int:
        return self.retries.get(failure, 0) if isinstance(self.retries, dict) else self.retries

    def treatment_of(self, failure: FailureClass) -> _Treatment:
        return self.on_error.get(failure, "mask") if isinstance(self.on_error, dict) else self.on_error

    @property
    def max_running(self) -> int:
        """Programs at a time, on each worker that samples."""
        return self.concurrency or (1024 if self.command is None else 128)

    @property
    def sandbox_spec(self) -> SandboxSpec | None:
        """Sandboxes of a function or environment."""
        if self.command is not None or not self.sandbox:
            return None
        return SandboxSpec() if isinstance(self.sandbox, bool) else self.sandbox

    @property
    def shown(self) -> str:
        """The program, for messages."""
        return self.function or self.environment or self.url or " ".join(self.command or ())


class TurnOptions(Section):
    """Several turns: tools or an environment answer the policy, and it continues.

    All of it is one response; tokens that the policy did not sample have ``response_mask`` 0. See `docs/multi_turn.md`.
    """

    max_turns: PositiveInt = 8
    """Most turns of the policy in a response with `tools` or an `environment`, the last of them without an answer; or
    most replies to an `agent`."""
    tools: tuple[str, ...] = ()
    """Functions that the policy may call: ``calculator``, ``python``, or your own as ``module:function``. The chat
    template describes them."""
    tool_args: dict[str, dict[str, object]] = Field(default_factory=dict)
    """Tool -> arguments that the pipeline sets and hides from the policy."""
    mcp_servers: dict[Name, McpServerSpec] = Field(default_factory=dict)
    """Servers of the Model Context Protocol, by name, whose tools the policy may call too."""
    tool_format: str = "hermes"
    """Syntax of the policy's calls: ``hermes``, as in Qwen 2.5 and 3; another backend's parser, for example ``llama3``;
    or your own parser, ``module:function``."""
    max_parallel_calls: Concurrency = 4
    """Calls of one turn that run in parallel; further ones are answered with an error."""
    tool_timeout_s: Seconds = 30.0
    """Timeout of a call, or of a step of the environment, in seconds."""
    tool_concurrency: Concurrency = 32
    """Calls and steps of the environment at a time, on each worker that samples."""
    max_turn_tokens: Tokens | None = None
    """Longest turn of the policy, in tokens. A turn that reaches it is cut, and the response ends with ``length``.
    Default: the rest of ``max_new_tokens``."""
    max_observation_tokens: Tokens = 512
    """Longest answer of a tool or the environment, in tokens; the middle of longer ones is cut out."""
    environment: OwnFunction | None = None
    """Your own class, ``module:Class``, that answers and rewards the policy turn by turn."""
    environment_args: dict[str, object] = Field(default_factory=dict)
    """Keyword arguments of the environment's constructor, called for each response."""
    on_environment_error: Literal["stop", "end"] = "stop"
    """If the environment raises or times out: stop the run, or end the response."""
    agent: OwnFunction | AgentSpec | None = None
    """Your own program, which calls the policy through an OpenAI endpoint: ``module:function``, or a section."""

    expected_turns: Annotated[float, Field(ge=1, allow_inf_nan=False)] | None = None
    """Turns of a response on average, for `dagrl plan` only. Default: half of `max_turns`."""
    expected_call_s: Coefficient | None = None
    """Expected seconds for the calls of a turn, or a step of the environment, for `dagrl plan` only. Default: 0."""

    @property
    def expected_answers(self) -> float:
        """Answered turns of a response on average, for the plan."""
        return (self.expected_turns or max(1.0, self.max_turns / 2)) - 1 if self.multi_turn else 0.0

    @property
    def agent_spec(self) -> AgentSpec | None:
        """The agent as a section."""
        return AgentSpec(function=self.agent) if isinstance(self.agent, str) else self.agent

    @property
    def multi_turn(self) -> bool:
        """Whether tools, an environment or an agent answer the policy."""
        return self.has_tools or self.environment is not None or self.agent is not None

    @property
    def has_tools(self) -> bool:
        """Whether the policy may call tools that dagrl runs."""
        return bool(self.tools or self.mcp_servers)

    @property
    def rows_per_sample(self) -> int:
        """Rows of one of the `n` samples, in training."""
        return self.agent_spec.sequences if self.agent_spec else 1


class RolloutNode(NodeBase, TurnOptions):
    """Samples `n` responses to each prompt."""

    op: Literal["rollout"]
    engine: Name
    """The engine that generates."""
    n: Responses = 1
    """Responses for each prompt, which form a group. A rollout after another one answers each row once."""
    sampling: SamplingSpec
    """Sampling in training."""
    val_sampling: SamplingSpec | None = None
    """Sampling in validation. Default: as in training, with temperature 0."""
    val_n: Responses = 1
    """Responses for each prompt in validation; several need a `val_sampling` with a temperature."""
    over_sampling_batch_size: PositiveInt | None = None
    """Prompts that a training step starts, more than it needs: the first ``data.prompts_per_step`` with complete
    responses form the step, the slowest are aborted. Default: ``data.prompts_per_step``."""
    partial_rollout: bool = False
    """Continue aborted responses in the next step. Default: they are discarded, and their prompts come again in the
    next epoch."""
    mask_offpolicy_in_partial_rollout: bool = False
    """Mask tokens that older weights sampled: their ``response_mask`` is 0."""
    partial_rollout_max_age: PositiveInt = 4
    """Policy versions by which sampled tokens may lag behind; a response with older tokens starts again."""
    max_prompt_tokens: Tokens | None = None
    """Longest prompt where a node of the pipeline makes the prompts: a longer one ends the run.
    Default: ``data.max_prompt_tokens``."""

    def prompts_begun(self, prompts_per_step: int) -> int:
        """Prompts that a training step begins."""
        return self.over_sampling_batch_size or prompts_per_step

    @property
    def writes_token_versions(self) -> bool:
        """Whether weights of several steps may sample a response, so that each token has a version."""
        return self.partial_rollout or self.agent is not None

    def contract(self, engine: EngineSpec | None = None, declared: OpContract | None = None) -> OpContract:
        reads: tuple[str, ...] = ("group_id", "prompt_tokens")
        writes: tuple[str, ...] = (*ROLLOUT_WRITES, *(("token_version",) if self.writes_token_versions else ()))
        if self.multi_turn:
            reads += ("extra_info",)
            writes += ("turns", *(TURN_COLUMNS if self.environment else TURN_COLUMNS[:-1]))
        if self.environment:
            reads += ("answer", "data_source")
        if self.agent:
            reads += ("messages", "answer", "data_source")
            writes += ("prompt_tokens", *AGENT_COLUMNS[: None if self.rows_per_sample > 1 else -1])
        replaces = ("prompt_tokens",) if self.agent else ()
        return OpContract(reads, writes, needs=Capability.GENERATE, replaces=replaces)
