"""What a rollout may say whose responses take several turns, with tools or an environment in between."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from dagrl.config.schema.section import Coefficient, Concurrency, OwnFunction, PositiveInt, Seconds, Section, Tokens


class TurnOptions(Section):
    """Several turns: the policy speaks, tools or an environment answer, the policy goes on behind that.

    All of it is one response: what the policy did not say itself has ``response_mask`` 0. `docs/multi_turn.md` is about
    this.
    """

    max_turns: PositiveInt = 8
    """Turns of the policy in a response, where there are `tools` or an `environment`; what it says in the last of them
    is not answered any more."""
    tools: tuple[str, ...] = ()
    """What the policy may call: ``calculator``, ``python``, or your own as ``module:function``. The chat template tells
    the policy of them."""
    tool_args: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Tool -> arguments that are set here, and that the policy does not know of."""
    tool_format: str = "hermes"
    """How the policy writes its calls: ``hermes``, as Qwen 2.5 and 3 do; the name of another of SGLang's parsers, such
    as ``llama3``; or a parser of your own, ``module:function``."""
    max_parallel_calls: Concurrency = 4
    """Calls of one turn that are answered, at the same time; all that follow are answered with an error."""
    tool_timeout_s: Seconds = 30.0
    """Seconds that a call, or a step of the environment, may take."""
    tool_concurrency: Concurrency = 32
    """Calls and steps of the environment at a time, on each worker that samples."""
    max_observation_tokens: Tokens = 512
    """Longest answer of a tool or the environment, in tokens; of a longer one the middle is left out."""
    environment: OwnFunction | None = None
    """Your own class, ``module:Class``, that answers what the policy says, and rewards it turn by turn."""
    environment_args: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments that the environment is made with, for each response anew."""
    on_environment_error: Literal["stop", "end"] = "stop"
    """When the environment raises or takes too long: stop the run and say where, or end the response there."""

    expected_turns: Annotated[float, Field(ge=1, allow_inf_nan=False)] | None = None
    """Turns that a response takes on average, for `dagrl plan` alone. Default: half of `max_turns`, if
    `expected_call_s` is said."""
    expected_call_s: Coefficient | None = None
    """Seconds that the calls of a turn, or a step of the environment, take, for `dagrl plan` alone. Default: it counts
    with none."""

    @property
    def expected_answers(self) -> float:
        """Turns of a response that somebody answers, on average, as the plan counts with them."""
        return (self.expected_turns or max(1.0, self.max_turns / 2)) - 1 if self.multi_turn else 0.0

    @property
    def multi_turn(self) -> bool:
        """Whether somebody answers the policy."""
        return bool(self.tools) or self.environment is not None
