"""How a generator draws tokens."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from dagrl.spec.schema.section import Coefficient, PositiveInt, Section


class SamplingSpec(Section):
    """How tokens are drawn, in SGLang's names."""

    temperature: Coefficient = 1.0
    """0 takes the likeliest token."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Smallest set of tokens with at least this probability."""
    top_k: int = -1
    """Likeliest so many tokens; -1 for all."""
    max_new_tokens: PositiveInt
    """Longest response, in tokens."""
    stop_token_ids: tuple[Annotated[int, Field(ge=0)], ...] = ()
    """End a response, beside the tokenizer's end-of-sequence token. The token that ends it is part of it."""
    ignore_eos: bool = False
    """Go on after the end-of-sequence token."""
