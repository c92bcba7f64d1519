"""How tokens are drawn, by rollouts, judges and for single validation sets."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from dagrl.config.errors import removal
from dagrl.config.schema.section import PositiveInt, Section, Tokens

_OTHER_POLICY = removal("changes the logits, and log-probs would belong to another policy")
_OF_TEXT = removal("concerns text, but input and output are token ids")


class SamplingSpec(Section):
    """How tokens are drawn."""

    refused: ClassVar[dict[str, str]] = {
        **dict.fromkeys(("frequency_penalty", "presence_penalty", "repetition_penalty", "logit_bias"), _OTHER_POLICY),
        **dict.fromkeys(("min_new_tokens", "json_schema", "regex", "ebnf", "structural_tag"), _OTHER_POLICY),
        **dict.fromkeys(("skip_special_tokens", "spaces_between_special_tokens", "no_stop_trim"), _OF_TEXT),
        "stop_regex": "is not supported; use `stop` or `stop_token_ids`",
        "n": "is an option of the node; write it beside `sampling`",
        "sampling_seed": removal("follows from run.seed"),
    }
    temperature: Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)] = 1.0
    """0 takes the likeliest token."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Smallest set of tokens with at least this probability."""
    top_k: Literal[-1] | PositiveInt = -1
    """Number of likeliest tokens; -1 for all."""
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Tokens with at least this fraction of the likeliest one's probability."""
    max_new_tokens: Tokens
    """Longest response, in tokens."""
    stop_token_ids: tuple[Annotated[int, Field(ge=0)], ...] = ()
    """End a response, beside the end tokens of the tokenizer, config.json and generation_config.json. The token that
    ends it is part of it."""
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Texts that end a response. The response keeps the text, and all of the token that completes it."""
    ignore_eos: bool = False
    """Go on after end tokens."""
