"""How a generator draws tokens."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from dagrl.config.schema.section import Section, Tokens

_OTHER_POLICY = "changes the logits, and log-probs would be those of another policy; take it out"
_OF_TEXT = "is about text, and tokens go in and out by their ids; take it out"


class SamplingSpec(Section):
    """How tokens are drawn, in SGLang's names."""

    refused: ClassVar[dict[str, str]] = {
        **dict.fromkeys(("frequency_penalty", "presence_penalty", "repetition_penalty", "logit_bias"), _OTHER_POLICY),
        **dict.fromkeys(("min_new_tokens", "json_schema", "regex", "ebnf", "structural_tag"), _OTHER_POLICY),
        **dict.fromkeys(("skip_special_tokens", "spaces_between_special_tokens", "no_stop_trim"), _OF_TEXT),
        **dict.fromkeys(("stop", "stop_regex"), "is text, and tokens go out by their ids; say `stop_token_ids`"),
        "n": "is said by the node; write it beside `sampling`",
        "sampling_seed": "follows from run.seed; take it out",
    }
    temperature: Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)] = 1.0
    """0 takes the likeliest token."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Smallest set of tokens with at least this probability."""
    top_k: int = -1
    """Likeliest so many tokens; -1 for all."""
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Tokens at least so likely as this part of the likeliest one."""
    max_new_tokens: Tokens
    """Longest response, in tokens."""
    stop_token_ids: tuple[Annotated[int, Field(ge=0)], ...] = ()
    """End a response, beside the tokenizer's end-of-sequence token. The token that ends it is part of it."""
    ignore_eos: bool = False
    """Go on after the end-of-sequence token."""
