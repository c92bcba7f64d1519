"""Compares what an engine samples with a Hugging Face model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from dagrl.backends.base import Completion, GenerationRequest
from dagrl.config.schema import SamplingSpec
from dagrl.data.batch import Batch, Column

GREEDY = SamplingSpec(max_new_tokens=16, temperature=0)
LONG = SamplingSpec(max_new_tokens=400, temperature=0, ignore_eos=True)
POSITIONS = 512
"""Positions of the model."""
ENDS = (1, 11)
"""Tokens that end a response: the tokenizer's, and that of the model's config."""
OLD, NEW = 5, 6
"""Seeds of the weights that an engine starts with, and of others."""


def complete(engine: Any, requests: Sequence[GenerationRequest], sampling: SamplingSpec) -> list[Completion]:
    """Completions in the order of their requests."""
    done = sorted(engine.generate(requests, sampling), key=lambda completion: completion.index)
    assert [completion.index for completion in done] == list(range(len(requests)))
    return done


@torch.inference_mode()
def log_probs(model: PreTrainedModel, tokens: Sequence[int], temperature: float = 1.0) -> torch.Tensor:
    """Log-probs of every next token after each of `tokens`: [tokens, vocabulary]."""
    return (model(torch.tensor([list(tokens)])).logits[0] / temperature).log_softmax(-1)


def log_probs_of(model: PreTrainedModel, request: GenerationRequest, completion: Completion) -> torch.Tensor:
    """`log_probs` at the tokens of a completion: [tokens, vocabulary]."""
    sequence = [*request.prompt.tolist(), *request.begun.tolist(), *completion.tokens.tolist()]
    return log_probs(model, sequence[:-1])[-len(completion.tokens) :]


def deviation(
    model: PreTrainedModel,
    request: GenerationRequest,
    completion: Completion,
    sampling: SamplingSpec = GREEDY,
    *,
    cut: bool = False,
) -> np.ndarray:
    """How far each token's log-prob is from the model's: [tokens].

    With `cut` from that of the distribution after top-k, top-p and min-p.
    """
    expected = log_probs_of(model, request, completion)
    if sampling.temperature:
        expected = (expected / sampling.temperature).log_softmax(-1)
    if cut:
        expected = expected.masked_fill(~kept(expected, sampling), -torch.inf).log_softmax(-1)
    picked = expected.gather(1, torch.from_numpy(completion.tokens).unsqueeze(1)).squeeze(1)
    return np.abs(picked.numpy() - completion.logprobs)


def kept(expected: torch.Tensor, sampling: SamplingSpec, *, together: bool = False) -> torch.Tensor:
    """Tokens that min-p, top-k and top-p leave, bool [tokens, vocabulary].

    Top-p is of what the others leave, or of the whole distribution if they apply `together`.
    """
    left = expected >= expected.amax(-1, keepdim=True) + np.log(max(sampling.min_p, 1e-30))
    order = expected.argsort(dim=-1, descending=True)
    rank = order.argsort(dim=-1)
    if sampling.top_k > 0:
        left &= rank < sampling.top_k
    among = (expected if together else expected.masked_fill(~left, -torch.inf)).softmax(-1)
    before = among.gather(-1, order).cumsum(-1) - among.gather(-1, order)
    return left & (before.gather(-1, rank) < sampling.top_p)


def is_greedy(model: PreTrainedModel, request: GenerationRequest, completion: Completion) -> bool:
    """Whether each token is the model's likeliest."""
    return log_probs_of(model, request, completion).argmax(-1).tolist() == completion.tokens.tolist()


def batch_of(pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> Batch:
    """Rows of these prompts and responses."""
    tokens = zip(*pairs, strict=True) if pairs else ((), ())
    names = ("prompt_tokens", "response_tokens")
    columns = {name: Column.ragged(list(each), "int64") for name, each in zip(names, tokens, strict=True)}
    return Batch(np.arange(len(pairs), dtype=np.int64), columns)


def scored(engine: Any, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> Column:
    """The log-probs of the responses."""
    return engine.logprobs(batch_of(pairs), temperature=1.0, tokens_per_micro_batch=1)
