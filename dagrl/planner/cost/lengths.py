"""Lengths of prompts and responses that the plan assumes before a run."""

from __future__ import annotations

from dataclasses import dataclass

from dagrl.backends.planning.decoding import Lengths
from dagrl.config.schema import JudgeNode, Pipeline, RolloutNode, SamplingSpec

MEAN_RESPONSE = 0.5
"""Mean response over ``max_new_tokens``, unless the call says ``--response-tokens``."""
MEAN_PROMPT = 0.5
"""Mean prompt over ``max_prompt_tokens``, unless the call says ``--prompt-tokens``."""
_CHARACTERS_PER_TOKEN = 4
"""In English, about."""


@dataclass(frozen=True, slots=True)
class Assumed:
    """Known mean lengths; None for the default shares."""

    prompt_tokens: float | None = None
    response_tokens: float | None = None

    def unless(self, other: Assumed) -> Assumed:
        """Return these lengths, replaced by the ones that `other` knows."""
        return Assumed(
            self.prompt_tokens if other.prompt_tokens is None else other.prompt_tokens,
            self.response_tokens if other.response_tokens is None else other.response_tokens,
        )


def lengths_of(pipeline: Pipeline, rollout: RolloutNode, assumed: Assumed, *, validation: bool = False) -> Lengths:
    """The lengths of a rollout's rows, within its limits. `validation` may have other limits than training.

    Sources with their own sampling count by their rows: the mean covers all rows, and the longest is the longest of
    any.

    ValueError if `assumed` exceeds the file's limits.
    """
    rollouts = pipeline.rollouts.values()
    sampling = (rollout.val_sampling if validation else None) or rollout.sampling
    rows = {} if validation else _rows_by_sampling(pipeline, rollout)
    rows = rows or {sampling: 1.0}
    longest, longest_prompt = max(sampling.max_new_tokens for sampling in rows), _longest_prompt(pipeline, rollout)
    response_limit = max(longest, *(node.sampling.max_new_tokens for node in rollouts))
    prompt_limit = max(_longest_prompt(pipeline, node) for node in rollouts)
    means = {sampling: sampling.max_new_tokens * (1.0 if sampling.ignore_eos else MEAN_RESPONSE) for sampling in rows}
    usual = sum(means[sampling] * count for sampling, count in rows.items()) / sum(rows.values())
    response = _mean("responses", assumed.response_tokens, response_limit, "sampling.max_new_tokens", usual)
    usual = longest_prompt * MEAN_PROMPT
    prompt = _mean("prompts", assumed.prompt_tokens, prompt_limit, "max_prompt_tokens", usual)
    return Lengths(min(prompt, longest_prompt), min(response, longest), longest)


def _rows_by_sampling(pipeline: Pipeline, rollout: RolloutNode) -> dict[SamplingSpec, float]:
    """Sampling -> share of the rows of training with it; empty if sources have no sampling of their own."""
    name = next(name for name, node in pipeline.rollouts.items() if node is rollout)
    rows: dict[SamplingSpec, float] = {}
    if own := pipeline.own_samplings(name):
        for source, spec in pipeline.data.sources.items():
            sampling = own.get(source, rollout.sampling)
            rows[sampling] = rows.get(sampling, 0.0) + spec.weight * pipeline.ns[source]
    return rows


def lengths_of_demonstrations(pipeline: Pipeline, assumed: Assumed) -> Lengths:
    """The lengths of the data set's responses, spread like a rollout's. ValueError as in `lengths_of`."""
    longest, longest_prompt = pipeline.data.max_response_tokens or 1, pipeline.data.max_prompt_tokens
    means = longest_prompt * MEAN_PROMPT, longest * MEAN_RESPONSE
    response = _mean("responses", assumed.response_tokens, longest, "data.max_response_tokens", means[1])
    prompt = _mean("prompts", assumed.prompt_tokens, longest_prompt, "max_prompt_tokens", means[0])
    return Lengths(prompt, response, longest)


def lengths_of_judgements(node: JudgeNode, judged: Lengths) -> Lengths:
    """Return the lengths of a judge's questions, which contain rows of the lengths `judged`, and of its replies."""
    template = (len(node.prompt) + len(node.system or "")) / _CHARACTERS_PER_TOKEN
    longest = node.sampling.max_new_tokens
    return Lengths(min(template + judged.row, node.max_prompt_tokens), longest * MEAN_RESPONSE, longest)


def _longest_prompt(pipeline: Pipeline, rollout: RolloutNode) -> int:
    return rollout.max_prompt_tokens or pipeline.data.max_prompt_tokens


def _mean(what: str, known: float | None, limit: int, field: str, usual: float) -> float:
    """The known mean, or else the default. ValueError for a mean above the limit."""
    if known is not None and not 0 < known <= limit:
        raise ValueError(
            f"{what} of {known:g} tokens on average do not fit the pipeline's {field}, {limit}; "
            f"choose a number between 1 and {limit}"
        )
    return usual if known is None else known
