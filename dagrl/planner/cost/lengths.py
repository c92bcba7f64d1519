"""How long prompts and responses are taken to be, where nobody knows before a run.

Responses are spread between 0 and the longest that is allowed: a share ``(x / longest) ** a`` of them is shorter than
x, with `a` chosen so that their mean is as asked. Half of the longest gives an even spread; all of it gives responses
that are all cut. The longest ones always come near the limit, and a rollout waits for them: the long tail.
"""

from __future__ import annotations

from dataclasses import dataclass

from dagrl.config.schema import JudgeNode, Pipeline, RolloutNode
from dagrl.graph.rollouts import rollouts

MEAN_RESPONSE = 0.5
"""Mean response over ``max_new_tokens``, unless the call says ``--response-tokens``."""
MEAN_PROMPT = 0.5
"""Mean prompt over ``max_prompt_tokens``, unless the call says ``--prompt-tokens``."""


_CHARACTERS_PER_TOKEN = 4
"""Of English, about."""


@dataclass(frozen=True, slots=True)
class Assumed:
    """What the caller knows of lengths; None is the share above."""

    prompt_tokens: float | None = None
    response_tokens: float | None = None


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens of the rows of a rollout."""

    prompt: float
    """Mean."""
    response: float
    """Mean."""
    longest: int
    """Longest response."""

    @property
    def row(self) -> float:
        """Mean tokens of a prompt and its response."""
        return self.prompt + self.response

    @property
    def mean_square(self) -> float:
        """Mean of the square of a row's tokens, which attention costs; all prompts count as the mean."""
        return self.prompt**2 + 2 * self.prompt * self.response + self._square_of_responses

    @property
    def varied(self) -> bool:
        """Whether responses differ in length."""
        return self.response < self.longest

    def quantile(self, share: float) -> float:
        """The length below which that share of the responses is."""
        if not self.varied:
            return float(self.longest)
        return max(1.0, self.longest * share ** (1 / self._shape))

    @property
    def _shape(self) -> float:
        """The exponent `a`, whose mean is ``a / (a + 1)``."""
        return self.response / (self.longest - self.response)

    @property
    def _square_of_responses(self) -> float:
        if not self.varied:
            return float(self.longest) ** 2
        return self._shape / (self._shape + 2) * self.longest**2


def lengths_of(pipeline: Pipeline, rollout: RolloutNode, assumed: Assumed, *, validation: bool = False) -> Lengths:
    """The lengths of a rollout's rows; of several rollouts, those with shorter limits keep to them. What is assumed is
    of training: `validation` may have a limit of its own.

    ValueError where the caller knows of lengths that the file does not allow.
    """
    every = rollouts(pipeline).values()
    sampling = (rollout.val_sampling if validation else None) or rollout.sampling
    longest, longest_prompt = sampling.max_new_tokens, _longest_prompt(pipeline, rollout)
    response, prompt = assumed.response_tokens, assumed.prompt_tokens
    if response is None:
        response = longest * (1.0 if sampling.ignore_eos else MEAN_RESPONSE)
    else:
        _check("responses", response, max(node.sampling.max_new_tokens for node in every), "sampling.max_new_tokens")
    if prompt is None:
        prompt = longest_prompt * MEAN_PROMPT
    else:
        _check("prompts", prompt, max(_longest_prompt(pipeline, node) for node in every), "max_prompt_tokens")
    return Lengths(min(prompt, longest_prompt), min(response, longest), longest)


def lengths_of_demonstrations(pipeline: Pipeline, assumed: Assumed) -> Lengths:
    """The lengths of the data set's responses, spread like those of a rollout. ValueError as in `lengths_of`."""
    data = pipeline.data
    longest = data.max_response_tokens or 1
    response, prompt = assumed.response_tokens, assumed.prompt_tokens
    if response is None:
        response = longest * MEAN_RESPONSE
    if prompt is None:
        prompt = data.max_prompt_tokens * MEAN_PROMPT
    _check("responses", response, longest, "data.max_response_tokens")
    _check("prompts", prompt, data.max_prompt_tokens, "max_prompt_tokens")
    return Lengths(prompt, response, longest)


def lengths_of_judgements(node: JudgeNode, judged: Lengths) -> Lengths:
    """Of a judge's questions, which show rows of the lengths `judged`, and of its replies, spread like responses."""
    template = (len(node.prompt) + len(node.system or "")) / _CHARACTERS_PER_TOKEN
    longest = node.sampling.max_new_tokens
    return Lengths(min(template + judged.row, node.max_prompt_tokens), longest * MEAN_RESPONSE, longest)


def _longest_prompt(pipeline: Pipeline, rollout: RolloutNode) -> int:
    return rollout.max_prompt_tokens or pipeline.data.max_prompt_tokens


def _check(what: str, mean: float, limit: int, field: str) -> None:
    if not 0 < mean <= limit:
        raise ValueError(
            f"{what} of {mean:g} tokens on average do not fit the pipeline's {field}, {limit}; "
            f"choose a number between 1 and {limit}"
        )
