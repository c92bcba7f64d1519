"""The text of a response, without the token that ended it."""

from __future__ import annotations

import numpy as np

from dagrl.model_files.end_tokens import end_tokens
from dagrl.ops.base import Context


def response_text(tokens: np.ndarray, context: Context) -> str:
    """A response without its end token.

    Other special tokens stay, so that a policy cannot hide them in an answer that is right without them.
    """
    ended = len(tokens) and int(tokens[-1]) in _ends(context)
    return context.resources.tokenizer.decode(tokens[:-1] if ended else tokens)


def _ends(context: Context) -> frozenset[int]:
    """Tokens that end a response; those of all sources, or validation sets."""
    resources, pipeline = context.resources, context.pipeline
    samplings = context.samplings or (context.sampling,)
    named = frozenset(token for sampling in samplings for token in sampling.stop_token_ids)
    if all(sampling.ignore_eos for sampling in samplings):
        return named
    model = pipeline.model_of(context.rollout.engine) if pipeline.rollouts else pipeline.model
    own = resources.once(f"ends of {context.sampled_by}", lambda: end_tokens(model, resources.tokenizer))
    return named | own
