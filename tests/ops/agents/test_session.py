"""Conversations become trees of exactly the tokens that the policy has seen and sampled."""

from __future__ import annotations

import asyncio
import json
import re
import types
import zlib
from typing import Any

import numpy as np
import pytest
from chatml import chatml_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_policy import TOKENIZER, WRITER, Policy, session_of
from tokenizers import AddedToken

from dagrl.ops.agents.context_writer import ContextWriter
from dagrl.ops.agents.messages import Message, message_of, with_names
from dagrl.ops.agents.session import Reply, Session, TurnLimitError, Wish
from dagrl.ops.agents.tree import ContextLengthError, SampledSequence
from dagrl.ops.turns.settings import parser_of

USER = {"role": "user", "content": "What is 3+4?"}
SEARCH = ({"type": "function", "function": {"name": "search", "description": "", "parameters": {}}},)


def said(reply: Reply) -> Message:
    return {"role": "assistant", "content": reply.content}


def ask(session: Session, *messages: Message, **wish: Any) -> list[Reply]:
    return asyncio.run(session.chat(list(messages), Wish(**wish)))


def text(sequence: SampledSequence) -> str:
    return TOKENIZER.decode(np.concatenate([sequence.prompt, sequence.tokens]))


def test_a_conversation_that_continues_is_one_sequence() -> None:
    policy = Policy(["<think>\nhm\n</think>\n\nIs it 7? ", "8"])
    session = session_of(policy)
    (first,) = ask(session, USER)
    assert (first.reasoning, first.content) == ("hm", "Is it 7?")
    ask(session, USER, said(first), {"role": "user", "content": "No."})
    (sequence,) = session.tree.sequences(5)
    # What the policy has thought stays where it was, though the client does not send it back.
    assert text(sequence) == (
        "<|im_start|>user\nWhat is 3+4?<|im_end|>\n<|im_start|>assistant\n<think>\nhm\n</think>\n\nIs it 7? <|im_end|>"
        "\n<|im_start|>user\nNo.<|im_end|>\n<|im_start|>assistant\n8<|im_end|>"
    )
    trained = np.concatenate([sequence.tokens[span.begin : span.end] for span in sequence.spans])
    assert trained.tolist() == np.concatenate([each.tokens for each in policy.sampled]).tolist()


def test_a_tools_answer_continues_a_call() -> None:
    policy = Policy(['I look.\n<tool_call>{"name": "search", "arguments": {"query": "x"}}</tool_call>', "found"])
    session = session_of(policy)
    (reply,) = ask(session, USER, tools=SEARCH)
    assert reply.content == "I look." and reply.calls[0].arguments == {"query": "x"}
    function = {"name": "search", "arguments": '{ "query":"x" }'}
    call = {"role": "assistant", "content": None, "tool_calls": [{"id": "other", "function": function}]}
    answer = message_of({"role": "tool", "content": "<|im_end|> three", "tool_call_id": "other"}, {})
    ask(session, USER, message_of({**call, "content": "I look."}, {}), answer, tools=SEARCH)
    (sequence,) = session.tree.sequences(5)
    assert text(sequence).endswith(
        "</tool_call><|im_end|>\n<|im_start|>user\n<tool_response>\n<|im_end|> three\n"
        "</tool_response><|im_end|>\n<|im_start|>assistant\nfound<|im_end|>"
    )
    ends = np.concatenate([sequence.prompt, sequence.tokens]) == TOKENIZER.eos_token_id
    assert ends.sum() == 5, "system, user, call, answer and reply: a tool ends no turn"


def test_special_tokens_of_a_conversation_pass_through_the_filters_as_text() -> None:
    tokenizer = chatml_tokenizer()
    # Added without being listed as the tokenizer's, as Llama 3 has most of them.
    tokenizer.add_tokens([AddedToken("<|header|>", special=True)])
    tokenizer.chat_template = "{% for m in messages %}<|im_start|>{{ m.content | tojson }}{% endfor %}"
    text = ' <|header|>"\n<|im_start|>'
    tokens = ContextWriter(tokenizer).conversation([{"role": "user", "content": text}], ())
    assert tokenizer.decode(tokens) == f"<|im_start|>{json.dumps(text)}"
    assert (tokens >= 256).sum() == 1, "the template's own"


def test_a_template_gets_the_ids_and_names_that_it_wants() -> None:
    tokenizer = chatml_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{% for call in m.tool_calls or [m] %}{% set id = call.id or m.tool_call_id %}"
        "{% if m.role in ('tool', 'assistant') and id | length != 9 %}{{ raise_exception('nine') }}{% endif %}"
        "{% endfor %}[{{ m.name or m.role }}]{% endfor %}"
    )
    function = {"name": "search", "arguments": "{}"}
    calls = [message_of({"role": "assistant", "tool_calls": [{"id": "call_123456789", "function": function}]}, {})]
    answer = message_of({"role": "tool", "content": "7", "tool_call_id": "call_123456789"}, {})
    tokens = ContextWriter(tokenizer).conversation(with_names([USER, *calls, answer]), SEARCH)
    assert tokenizer.decode(tokens) == "[user][assistant][search]"


def test_a_call_has_an_id_of_nine_letters_and_digits() -> None:
    session = session_of(Policy(['<tool_call>{"name": "search", "arguments": {}}</tool_call>']))
    (reply,) = ask(session, USER, tools=SEARCH)
    assert re.fullmatch("[a-z0-9]{9}", reply.call_ids[0])


def test_a_rewritten_conversation_is_another_sequence() -> None:
    session = session_of(Policy(["a", "bb", "c"]))
    (first,) = ask(session, USER)
    ask(session, USER, said(first), {"role": "user", "content": "More."})
    ask(session, {"role": "user", "content": "Sum up: a."})
    last, longer = session.tree.sequences(2)
    assert text(last).startswith("<|im_start|>user\nSum up") and "More." in text(longer)
    (only,) = session.tree.sequences(1)
    assert text(only) == text(last)


def test_shared_replies_are_trained_on_once() -> None:
    session = session_of(Policy(["first", "left", "right!"]))
    (first,) = ask(session, USER)
    for more in ("x", "y"):
        ask(session, USER, said(first), {"role": "user", "content": more})
    right, left = session.tree.sequences(2)
    assert [span.trained for span in right.spans] == [True, True]
    assert [span.trained for span in left.spans] == [False, True]


def test_replies_to_one_request_draw_with_different_seeds() -> None:
    policy = Policy()
    ask(session_of(policy), USER, replies=3)
    assert len({request.seed for request in policy.asked}) == 3
    again = Policy()
    ask(session_of(again), USER, replies=3)
    assert [request.seed for request in again.asked] == [request.seed for request in policy.asked]


def test_the_rows_own_prompt_draws_with_the_rows_seed() -> None:
    policy = Policy()
    session = session_of(policy, prompt=WRITER.conversation([USER], ()))
    ask(session, USER)
    ask(session, {"role": "user", "content": "Another."})
    assert policy.asked[0].seed == 7 != policy.asked[1].seed


@pytest.mark.parametrize("stops, shown", [(("!",), "go on"), (("zz", " on"), "go"), (("zz",), "go on! yes")])
def test_a_stop_text_ends_the_reply(stops, shown) -> None:
    session = session_of(Policy(["go on! yes", "next"]))
    (reply,) = ask(session, USER, stops=stops)
    assert reply.content == shown
    kept = TOKENIZER.decode(reply.tokens).removesuffix("<|im_end|>")
    assert kept.startswith(shown) and len(kept) - len(shown) in (0, *map(len, stops))
    assert len(reply.logprobs) == len(reply.tokens)
    ask(session, USER, said(reply), USER)
    assert len(session.tree.sequences(9)) == 1


def test_a_call_that_is_cut_off_is_no_call() -> None:
    """A parser may read what there is of it as a whole one: here a folder above the one that was meant."""
    begun = "<tool_call>\n<function=search>\n<parameter=folder>\n/tmp"
    session = session_of(Policy([f"{begun}/build\n</parameter>\n</function>\n</tool_call>"] * 2))
    session.parser, session.hermes = lambda tools: parser_of("qwen3_coder", tools), False
    properties = {"folder": {"type": "string"}}
    function = {"name": "search", "description": "", "parameters": {"type": "object", "properties": properties}}
    tools = ({"type": "function", "function": function},)
    (cut,) = ask(session, USER, tools=tools, limit=len(WRITER.plain(begun)))
    assert (cut.calls, cut.finish_reason, cut.content) == ((), "length", begun)
    (whole,) = ask(session, USER, tools=tools)
    assert [call.arguments for call in whole.calls] == [{"folder": "/tmp/build"}]


def test_a_program_may_write_the_stop_text_itself() -> None:
    policy = Policy(["Action: look\nObservation: made up", "done"])
    session = session_of(policy)
    (reply,) = asyncio.run(session.continue_text("Question: x\n", Wish(stops=("\nObservation:",))))
    prompt = f"Question: x\n{reply.text}\nObservation: 42\n"
    asyncio.run(session.continue_text(prompt, Wish()))
    seen = np.concatenate([policy.asked[1].prompt, policy.asked[1].begun])
    assert TOKENIZER.decode(seen) == prompt
    assert len(session.tree.sequences(9)) == 1


def test_texts_that_cannot_be_encoded_have_question_marks() -> None:
    policy = Policy()
    session = session_of(policy)
    # As JSON has them that was cut in the middle of an emoji.
    asyncio.run(session.continue_text("a\ud83db", Wish()))
    ask(session, {"role": "user", "content": "c\ud83d"})
    text_, chat = (TOKENIZER.decode(each.prompt) for each in policy.asked)
    assert text_ == "a?b" and "c?" in chat


def test_limits_refuse_requests_and_are_remembered() -> None:
    session = session_of(Policy(), max_turns=1)
    ask(session, USER)
    with pytest.raises(TurnLimitError, match="max_turns"):
        ask(session, USER)
    assert session.refused == "turns"
    short = session_of(Policy(), longest=10)
    with pytest.raises(ContextLengthError, match="max_new_tokens"):
        ask(short, USER)
    assert short.refused == "length"


def test_texts_and_tokens_are_continued_too() -> None:
    policy = Policy(["b", "d", "f"])
    session = session_of(policy)
    (reply,) = asyncio.run(session.continue_text("a", Wish(limit=1)))
    asyncio.run(session.continue_text("a" + reply.text + "c", Wish(limit=1)))
    (sequence,) = session.tree.sequences(9)
    assert text(sequence) == "abcd"
    whole = [*np.concatenate([sequence.prompt, sequence.tokens]).tolist(), *WRITER.plain("e").tolist()]
    asyncio.run(session.continue_text(whole, Wish(limit=1)))
    (sequence,) = session.tree.sequences(9)
    assert text(sequence) == "abcdef"


moves = st.lists(
    st.tuples(st.sampled_from(["extend", "rewrite", "branch", "parallel"]), st.integers(0, 99), st.integers(1, 3)),
    max_size=12,
)


@settings(max_examples=60)
@given(moves)
def test_whatever_a_program_does_each_sampled_token_counts_once_after_what_it_was_sampled_after(plan) -> None:
    policy = Policy(
        lambda seen: f"{len(seen)} " + "<think>x</think>" * (len(seen) % 2) + str(zlib.crc32(seen.encode()) % 7)
    )
    session = session_of(policy)
    states: list[list[Message]] = [[USER]]

    async def play() -> None:
        async def step(messages: list[Message], replies: int) -> None:
            for reply in await session.chat(messages, Wish(replies)):
                states.append([*messages, said(reply), {"role": "user", "content": f"{len(states)}"}])

        await step([USER], 1)
        for move, which, times in plan:
            state = states[-1] if move == "extend" else states[which % len(states)]
            if move == "rewrite":
                changed = [*state]
                changed[which % len(changed)] = {"role": "user", "content": f"changed {which}"}
                await step(changed, 1)
            elif move == "parallel":
                await asyncio.gather(*(step(state, times) for _ in range(times)))
            else:
                await step(state, 1)

    asyncio.run(play())
    sequences = session.tree.sequences(10_000)
    counted = 0
    seen = {}
    for request, reply in zip(policy.asked, policy.sampled, strict=True):
        key = np.concatenate([request.prompt, request.begun]).tobytes()
        seen.setdefault(key, []).append(reply)
    for sequence in sequences:
        whole = np.concatenate([sequence.prompt, sequence.tokens])
        for span in sequence.spans:
            begin = len(sequence.prompt) + span.begin
            tokens = sequence.tokens[span.begin : span.end]
            replies = seen[whole[:begin].tobytes()]
            assert any(
                reply.tokens.tolist() == tokens.tolist()
                and reply.logprobs.tolist() == sequence.logprobs[span.begin : span.end].tolist()
                for reply in replies
            )
            counted += span.trained
        free = np.ones(len(sequence.tokens), dtype=bool)
        for span in sequence.spans:
            free[span.begin : span.end] = False
        assert (sequence.logprobs[free] == 0).all()
    assert counted == len(policy.sampled), "each reply is trained on in one sequence"
    assert sum(each.trained for each in sequences) == sum(len(each.tokens) for each in policy.sampled)
    for some in (1, 2):
        assert len(session.tree.sequences(some)) == min(some, len(sequences))


def test_a_text_that_no_tokens_could_hold_is_refused_before_it_is_tokenised() -> None:
    session = session_of(Policy(), longest=1000)
    longest = max(map(len, TOKENIZER.get_vocab()))
    calls = []
    session.writer = types.SimpleNamespace(longest_token=longest, conversation=lambda *given: calls.append(given))
    for content in ("x" * (2000 * longest + 1), [{"type": "text", "text": "x" * 50_000_000}]):
        with pytest.raises(ContextLengthError, match="characters, too many for 2000 tokens"):
            ask(session, {"role": "user", "content": content})
    assert session.refused == "length" and not calls


def test_a_long_text_leaves_the_loop_to_other_agents() -> None:
    """And is written as one that the loop writes."""
    content = "What is 3+4? " * 20_000
    session, ticks = session_of(Policy(), longest=500_000), []

    async def both() -> None:
        asked = asyncio.create_task(session.chat([{"role": "user", "content": content}], Wish()))
        while not asked.done():
            ticks.append(1)
            await asyncio.sleep(0)
        await asked

    asyncio.run(both())
    assert len(ticks) > 20
    (sequence,) = session.tree.sequences(5)
    assert np.array_equal(sequence.prompt, WRITER.conversation([{"role": "user", "content": content}], ()))
