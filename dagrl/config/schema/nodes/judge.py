"""`judge`: scores responses with a language model."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from dagrl.config.capability import Capability
from dagrl.config.schema.engine import EngineSpec
from dagrl.config.schema.nodes.base import EndpointNode, OpContract, SelectiveNode
from dagrl.config.schema.sampling import SamplingSpec
from dagrl.config.schema.section import Name, Reward, Tokens


class JudgeNode(SelectiveNode, EndpointNode):
    """Asks a language model about each response, and extracts a score from its reply."""

    op: Literal["judge"]
    engine: Name | None = None
    """A generating engine of this pipeline, asked with the chat template of its model. An engine with ``weights_from``
    judges with the weights that sampled the step."""
    prompt: str
    """The question. ``{prompt}``, ``{response}``, ``{answer}`` and ``{data_source}`` are filled in; other braces are
    kept."""
    images: bool = False
    """Also show the prompt's images, at their places in ``{prompt}``, to a vision model."""
    system: str | None = None
    """A system message before it, used verbatim. Default: none."""
    parser: str = r"-?\d+(?:\.\d+)?"
    """Finds the score in the reply: a regular expression, whose last match counts (or its first group), or your own
    function as ``module:function``."""
    scores: Annotated[dict[str, Reward], Field(min_length=1)] | None = None
    """Scores of the words that the regular expression matches, such as ``{GOOD: 1, BAD: 0}``. Default: it matches a
    number."""
    sampling: SamplingSpec = SamplingSpec(temperature=0.0, max_new_tokens=1024)
    """Sampling of the reply."""
    max_prompt_tokens: Tokens = 8192
    """Engines only: longest question, chat template applied; a sample with a longer one fails."""
    chat_template_kwargs: dict[str, object] = Field(default_factory=dict)
    """Engines only: further arguments of the chat template, such as ``{enable_thinking: false}``."""
    extra_body: dict[str, object] = Field(default_factory=dict)
    """Endpoints only: further fields of the request, or replacements of fields; ``null`` omits a field."""
    expected_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    """Endpoints only: expected seconds of an answer, for `dagrl plan` only. Default: 15 ms for each token of a reply of
    half the longest length."""
    on_error: Literal["stop"] | Reward = "stop"
    """Without a reply, or without a score in it: stop the run and name the sample, or give the sample this reward. A
    refused key or address always stops the run."""

    def contract(self, engine: EngineSpec | None = None, declared: OpContract | None = None) -> OpContract:
        reads = tuple(
            dict.fromkeys(("messages", "response_tokens", "answer", "data_source", *self.chosen_by(declared)))
        )
        needs = Capability.REPLY if self.engine else None
        # The rows of a trajectory have one score.
        return OpContract(reads, ("reward",), reads_if_written=("token_turn",), needs=needs, whole_groups=True)
