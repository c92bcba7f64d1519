"""Stop strings in the tokens of a response."""

from __future__ import annotations

import pytest
from chatml import chatml_tokenizer
from hypothesis import given
from hypothesis import strategies as st

from dagrl.backends.runtime.stop_strings import StopSearch, StopStrings

TOKENIZER = chatml_tokenizer([("a", "b"), ("ab", "c"), ("Ċ", "Ċ"), ("Ċ", "Q")])


def found(text: str, *stops: str, before: str = "") -> str | None:
    """What the tokens of `text` say up to the one that completes a stop string."""
    encode = TOKENIZER.encode
    search = StopSearch(StopStrings(TOKENIZER, stops), encode(before))
    tokens = encode(text)
    ended = search.see(tokens)
    assert ended == (search.length is not None)
    return TOKENIZER.decode(tokens[: search.length]) if ended else None


@pytest.mark.parametrize(
    ("text", "stops", "kept"),
    [
        ("say </answer> more", ("</answer>",), "say </answer>"),
        ("none", ("</answer>",), None),
        # The token that completes it may say more.
        ("xabcb", ("b",), "xabc"),
        ("one\n\n\nQ", ("\n\n",), "one\n\n"),
        ("one\n\nQ", ("\n\n",), "one\n\nQ"[:5]),
        ("größe", ("ö",), "grö"),
        ("two words", (" ",), "two "),
        ("a<|im_end|>b", ("<|im_end|>",), "a<|im_end|>"),
        ("x1 then x2", ("x2", "x1"), "x1"),
        ("😀 after", ("😀",), "😀"),
        ("aaab", ("aab",), "aaab"),
    ],
)
def test_a_response_ends_with_the_token_that_completes_a_string(text: str, stops: tuple[str, ...], kept) -> None:
    assert found(text, *stops) == kept


def test_a_stop_string_may_begin_in_earlier_tokens_of_the_policy() -> None:
    assert found("swer> more", "</answer>", before="say </an") == "swer>"
    assert found("more", "</answer>", before="say </an") is None


@given(st.text(alphabet="abc\n é😀", max_size=30), st.text(alphabet="abc\n é😀", min_size=1, max_size=4))
def test_it_is_found_wherever_it_is_written(text: str, stop: str) -> None:
    tokens = TOKENIZER.encode(text)
    ends = [end for end in range(1, len(tokens) + 1) if stop in TOKENIZER.decode(tokens[:end])]
    search = StopSearch(StopStrings(TOKENIZER, [stop]), [])
    assert search.see(tokens) == bool(ends)
    assert search.length == (ends[0] if ends else None)
