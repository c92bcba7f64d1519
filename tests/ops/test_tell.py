"""Prompts that a teacher is told: what is in them, for which rows, and how long they may be."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagrl.data.batch import Batch, Column
from dagrl.ops.base import OpInput, Output
from dagrl.ops.tell import _peers, tell

CHATML = (
    "{% for t in tools or [] %}<tool>{{ t.function.name }}{% endfor %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
USER = {"role": "user", "content": "2+3="}
SYSTEM = {"role": "system", "content": "Add."}
EVERYTHING = "{{ prompt }}|{{ demonstration }}|{{ response }}|{{ feedback }}"
DEMONSTRATION = {"demonstration": "extra_info.solution", "template": "{{ prompt }}|{{ demonstration }}"}
MODEL = {"init": {"model_type": "qwen3"}, "tokenizer": {"kind": "bytes"}}


class Told:
    """Tells the rows of one batch with options of the node."""

    def __init__(self, bench: Any) -> None:
        self._bench = bench

    def context(self, **options: Any) -> Any:
        nodes = {"told": {"op": "tell", "max_prompt_tokens": 200, **options}}
        context = self._bench.context("told", nodes=nodes, model=MODEL)
        context.resources.tokenizer.chat_template = CHATML
        return context

    def __call__(self, rows: list[dict[str, Any]], **options: Any) -> Output:
        context = self.context(**options)
        encode = context.resources.tokenizer.encode
        full = [{"chat": [USER], "extra": {}, "reward": 0.0, "group": 0, "response": "5", **row} for row in rows]
        prompts = [row.get("prompt", "".join(f"<{m['role']}>{m['content']}" for m in row["chat"])) for row in full]
        columns = {
            "prompt_tokens": Column.ragged([encode(prompt) for prompt in prompts], "int64"),
            "messages": Column.text([json.dumps(row["chat"]) for row in full]),
            "extra_info": Column.text([json.dumps(row["extra"]) for row in full]),
            "answer": Column.text([row.get("answer", "") for row in full]),
            "reward_info": Column.text([json.dumps(row.get("info", {})) for row in full]),
            "reward": Column(np.array([row["reward"] for row in full], dtype=np.float32)),
            "group_id": Column(np.array([row["group"] for row in full], dtype=np.int64)),
            "response_tokens": Column.ragged([[*encode(row["response"]), 257] for row in full], "int64"),
        }
        (output,) = tell([OpInput(3, Batch(np.arange(10, 10 + len(rows)), columns))], context)
        assert output.shards == (3,) and output.rows.tolist() == list(range(10, 10 + len(rows)))
        return output

    def texts(self, rows: list[dict[str, Any]], **options: Any) -> list[str | None]:
        """The told prompts; None for rows that are masked."""
        output = self(rows, **options)
        decode = self.context().resources.tokenizer.decode
        prompts, mask = output.columns["teacher_prompt_tokens"], output.columns["teacher_mask"]
        return [decode(prompts[row]) if mask.values[row] else None for row in range(len(rows))]


@pytest.fixture
def told(bench) -> Told:
    return Told(bench)


@pytest.mark.parametrize(
    ("row", "options", "expected"),
    [
        ({"extra": {"solution": "five"}}, {}, "<user>2+3=|five<assistant>"),
        ({"extra": {"solution": "five"}}, {"message": "system"}, "<system>2+3=|five<user>2+3=<assistant>"),
        ({"extra": {"a": {"b": 5}}}, {"demonstration": "extra_info.a.b"}, "<user>2+3=|5<assistant>"),
        ({"answer": "5"}, {"demonstration": "answer"}, "<user>2+3=|5<assistant>"),
        (
            {"extra": {"solution": "five"}, "chat": [SYSTEM, USER]},
            {"message": "system"},
            "<system>Add.\n\n2+3=|five<user>2+3=<assistant>",
        ),
        # The last question of several, with what was said before.
        (
            {"extra": {"solution": "five"}, "chat": [USER, {"role": "assistant", "content": "6"}, USER]},
            {},
            "<user>2+3=<assistant>6<user>2+3=|five<assistant>",
        ),
        # A chat without a question of the user.
        ({"extra": {"solution": "five"}, "chat": [SYSTEM]}, {}, "<system>Add.|five<assistant>"),
        (
            {"extra": {"solution": "five"}, "chat": [USER, {"role": "tool", "content": "6"}]},
            {},
            "<user>2+3=|five<tool>6<assistant>",
        ),
        # A prompt that is text stays text.
        ({"extra": {"solution": "five"}, "prompt": "2+3="}, {}, "2+3=|five"),
        ({"extra": {"solution": "five"}, "prompt": "2+3="}, {"message": "system"}, "2+3=|five\n\n2+3="),
        ({"info": {"why": "too low"}}, {"feedback": "why", "template": EVERYTHING}, "<user>2+3=|||too low<assistant>"),
        ({"info": {"why": 0.5}}, {"feedback": "why", "template": EVERYTHING}, "<user>2+3=|||0.5<assistant>"),
        # Nothing to tell.
        ({}, {}, None),
        ({"extra": {"solution": ""}}, {}, None),
        ({"extra": {"solution": None}}, {}, None),
        ({"extra": {"other": "five"}}, {}, None),
        ({"info": {}}, {"feedback": "why"}, None),
        # Too long: 34 tokens.
        ({"extra": {"solution": "five" * 4}}, {"max_prompt_tokens": 38}, "<user>2+3=|" + "five" * 4 + "<assistant>"),
        ({"extra": {"solution": "five" * 4}}, {"max_prompt_tokens": 37}, None),
    ],
)
def test_what_a_row_is_told(told, row: dict[str, Any], options: dict[str, Any], expected: str | None) -> None:
    assert told.texts([row], **{**DEMONSTRATION, **options}) == [expected]


def test_a_row_is_told_the_next_right_response_of_its_group(told) -> None:
    rows = [
        {"response": response, "reward": reward, "group": group}
        for response, reward, group in [
            *(("a", 0.0, 0), ("b", 1.0, 0), ("c", 0.2, 0), ("d", 0.5, 0)),
            *(("e", 1.0, 1), ("f", 0.0, 1)),
            *(("g", 0.4, 2), ("h", 0.0, 2)),
        ]
    ]
    texts = told.texts(rows, peer_reward=0.5, template="{{ prompt }}{{ response }}")
    said = [text and text.removeprefix("<user>2+3=").removesuffix("<assistant>") for text in texts]
    # The only right response of a group is told to the others, and not to itself.
    assert said == ["b", "d", "d", "b", None, "e", None, None]


def test_an_empty_shard_is_told_nothing(told) -> None:
    output = told([], **DEMONSTRATION)
    assert [len(column) for column in output.columns.values()] == [0, 0]


def test_a_reward_of_the_threshold_is_right(told) -> None:
    rows = [{"response": "a", "reward": 0.9}, {"response": "b", "reward": 0.0}]
    assert told.texts(rows, peer_reward=0.9, template="{{ prompt }}{{ response }}")[1] == "<user>2+3=a<assistant>"


def test_an_extra_info_without_fields_is_named_with_its_sample(told) -> None:
    with pytest.raises(ValueError, match="sample 11 has a value of `extra_info` that is no struct"):
        told([{"extra": {"solution": "5"}}, {"extra": "text"}], **DEMONSTRATION)


def test_a_template_that_fails_is_named(told) -> None:
    with pytest.raises(ValueError, match="`template` of op tell cannot be filled in"):
        told([{"extra": {"solution": "5"}}], demonstration="extra_info.solution", template="{{ demonstration / 2 }}")


def test_the_default_template_tells_all_there_is(told) -> None:
    row = {"extra": {"solution": "SOLUTION"}, "info": {"why": "FEEDBACK"}, "reward": 0.0}
    peer = {"response": "RESPONSE", "reward": 1.0}
    options = {"demonstration": "extra_info.solution", "feedback": "why", "peer_reward": 1.0, "max_prompt_tokens": 999}
    both, alone = told.texts([row, peer], **options)
    assert both and all(word in both for word in ("2+3=", "SOLUTION", "RESPONSE", "FEEDBACK"))
    assert alone is None


def test_masked_rows_keep_their_prompts_and_are_counted(told) -> None:
    output = told([{"extra": {"solution": "five"}}, {}, {"extra": {"solution": "5" * 99}}], **DEMONSTRATION)
    lengths = output.columns["teacher_prompt_tokens"].lengths.tolist()
    assert output.columns["teacher_mask"].values.tolist() == [1.0, 0.0, 1.0]
    assert lengths[1] == len("<user>2+3=")
    short = told(
        [{"extra": {"solution": "five"}}, {}, {"extra": {"solution": "5" * 99}}], **DEMONSTRATION, max_prompt_tokens=50
    )
    assert short.columns["teacher_mask"].values.tolist() == [1.0, 0.0, 0.0]
    means = {name: stat.mean for name, stat in short.stats.items()}
    assert means == pytest.approx(
        {"tell/told_fraction": 1 / 3, "tell/too_long_fraction": 1 / 3, "tell/prompt_tokens": 26.0}
    )
    assert short.uncounted == ("teacher_prompt_tokens",)


def test_tools_are_described_to_the_teacher_too(bench) -> None:
    bench.write_module(
        "mine",
        "import dagrl\n@dagrl.tool\ndef look(where: str) -> str:\n    'Look. where: A place.'\n    return where\n",
    )
    rollout = {
        "op": "rollout",
        "engine": "generator",
        "tools": ["mine:look"],
        "max_turns": 2,
        "sampling": {"max_new_tokens": 3},
    }
    nodes = {"rollout": rollout, "told": {"op": "tell", "max_prompt_tokens": 99, **DEMONSTRATION}}
    context = bench.context("told", nodes=nodes, model=MODEL)
    tokenizer = context.resources.tokenizer
    tokenizer.chat_template = CHATML
    batch = Batch(
        np.arange(1),
        {
            "prompt_tokens": Column.ragged([tokenizer.encode("<tool>look<user>2+3=<assistant>")], "int64"),
            "messages": Column.text([json.dumps([USER])]),
            "extra_info": Column.text([json.dumps({"solution": "5"})]),
        },
    )
    (output,) = tell([OpInput(0, batch)], context)
    assert tokenizer.decode(output.columns["teacher_prompt_tokens"][0]) == "<tool>look<user>2+3=|5<assistant>"


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from([0.0, 0.5, 1.0]), st.booleans()), max_size=20))
def test_a_peer_is_right_of_the_same_group_and_another_row(rows: list[tuple[int, float, bool]]) -> None:
    groups, rewards, excluded = (np.array(each) for each in zip(*rows, strict=True)) if rows else (np.zeros(0),) * 3
    columns = {"group_id": Column(groups.astype(np.int64)), "reward": Column(rewards.astype(np.float32))}
    batch = Batch(np.arange(len(rows)), {**columns, "excluded": Column(excluded.astype(np.float32))})
    peers = _peers(batch, 0.5)
    able = [index for index, (_, reward, failed) in enumerate(rows) if reward >= 0.5 and not failed]
    for row, peer in enumerate(peers.tolist()):
        others = [index for index in able if rows[index][0] == rows[row][0] and index != row]
        assert (peer in others) if others else peer == -1
    # Whatever the shards, as they hold whole groups.
    for group in set(groups.tolist()):
        mine = np.flatnonzero(groups == group)
        alone = _peers(batch.take(mine), 0.5)
        assert [mine[peer] if peer >= 0 else -1 for peer in alone.tolist()] == peers[mine].tolist()
