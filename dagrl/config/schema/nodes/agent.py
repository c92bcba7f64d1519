"""The agent of a rollout: a program that speaks to the policy through an OpenAI endpoint."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from dagrl.config.schema.section import Concurrency, OwnFunction, Seconds, Section


class AgentSpec(Section):
    """A program that speaks to the policy through an OpenAI endpoint: a `function`, an environment of `verifiers`, a
    `command` or a service at a `url`.

    The function alone may stand in place of the section, ``agent: "module:function"``. See `docs/gateway.md`.
    """

    function: OwnFunction | None = None
    """An async function, ``module:function``, of an `openai.AsyncOpenAI` client and the row."""
    args: dict[str, object] = Field(default_factory=dict)
    """Further keyword arguments of the function, or those of the environment's ``load_environment``."""
    verifiers: Annotated[str, Field(pattern=r"^[A-Za-z_][\w-]*$")] | None = None
    """An environment of the package verifiers, by its id. Its module is installed, or beside the pipeline file."""
    command: Annotated[tuple[str, ...], Field(min_length=1)] | None = None
    """A program (``python``: the worker's) and its arguments, started for each sample in the folder of the pipeline
    file, with ``OPENAI_BASE_URL`` and ``OPENAI_API_KEY`` in its environment and the row as JSON on its standard
    input."""
    env: dict[str, str] = Field(default_factory=dict)
    """Further variables of the command's environment, which has little of the worker's."""
    sandbox: bool = False
    """Confine a command ``[python, FILE, ...]`` as the code of a policy is: it sees a copy of that file, an empty
    folder and Python's packages, starts no processes, and connects to nothing but the endpoint's port, on any host:
    Linux confines programs to ports, not to addresses."""
    url: Annotated[str, Field(pattern=r"^https?://")] | None = None
    """A service that is posted ``base_url``, ``api_key`` and ``row``, and answers with ``reward``."""
    listen: Literal["loopback", "node"] = "loopback"
    """Where the endpoint listens: for programs of the same machine, or on the machine's address, for services of
    others."""
    timeout_s: Seconds = 600.0
    """Seconds that the program may take for a sample."""
    concurrency: Concurrency | None = None
    """Programs at a time, on each worker that samples. They may be more than its engine takes requests. Default: 1024,
    and 128 where each is a process."""
    retries: Annotated[int, Field(ge=0, le=100)] = 0
    """How often a program that fails is run again, with the same draws of the policy."""
    on_error: Literal["mask", "zero", "stop"] = "mask"
    """When the program fails at last: leave its sample out of losses and baselines, give it the reward 0, or stop the
    run."""
    sequences: Annotated[int, Field(ge=1, le=64)] = 1
    """Rows of a trajectory: conversations that do not continue each other are trained on separately, at most so
    many."""

    @property
    def max_running(self) -> int:
        """Programs at a time, on each worker that samples."""
        return self.concurrency or (1024 if self.command is None else 128)

    @property
    def shown(self) -> str:
        """The program, for messages."""
        return self.function or self.verifiers or self.url or " ".join(self.command or ())
