"""Rows that a run cannot use: found when the pipeline is checked, with file and row."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dagrl.config.loading.prompt_files import PromptFile
from dagrl.config.schema import SourceSpec
from dagrl.validation import check_file, data_rows, sampled_files

NODES = """\
  rollout: {op: rollout, engine: generator, n: 4, sampling: {max_new_tokens: 8}}
  reward: {op: reward, fn: exact}
  ref: {op: logprob, engine: reference, write: ref_logprob}
  advantage: {op: advantage, estimator: grpo}
  update: {op: update, engine: actor, loss: {kl_coef: 0.01}}
"""
SFT = "  sft: {op: sft, engine: actor}\n"
DPO = (
    "  ref: {op: logprob, engine: reference, read: {response_tokens: demonstration}, write: ref_logprob}\n"
    "  dpo: {op: dpo, engine: actor}\n"
)
OFFLINE = (
    ("  generator: {backend: hf, group: rollout, weights_from: actor}\n", ""),
    ("  rollout: {cpus_per_node: 1}\n", ""),
)


def message(role, content):
    return {"role": role, "content": content}


GOOD = [message("user", "1+1=")]
ANSWERED = [*GOOD, message("assistant", "2")]


def filled(good, bad, column="prompt", where=2):
    """Ten rows of the good value and one of the bad one."""
    return [{column: bad if row == where else good} for row in range(10)]


def rows_of(values, row):
    return [{**row, **value} for value in values]


def the_problem(project, path):
    problems = [each for each in project.problems(path) if each.place == "data.train"]
    assert len(problems) == 1, "\n".join(map(str, problems))
    assert "; " in problems[0].message
    assert "\n" not in problems[0].message
    return problems[0].message


PROMPTS = {
    "null text": (filled("1+1=", None), "has a prompt of null in row 2 (the first is 0); a run would end there"),
    "empty text": (filled("1+1=", ""), "has an empty prompt in row 2 (the first is 0)"),
    "null chat": (filled(GOOD, None), "has a prompt of null in row 2"),
    "no messages": (filled(GOOD, []), "has an empty prompt in row 2"),
    "only empty messages": (filled(GOOD, [message("user", ""), message("user", "")]), "has an empty prompt in row 2"),
    "null message": (filled(GOOD, [None]), "has a message without role in its prompt in row 2"),
    "null message among others": (filled(GOOD, [*GOOD, None]), "has a message without role in its prompt in row 2"),
    "no role": (filled(GOOD, [message(None, "x")]), "has a message without role in its prompt in row 2"),
    "no content": (filled(GOOD, [message("user", None)]), "has a message without content in its prompt in row 2"),
    "no content behind others": (
        filled(GOOD, [*GOOD, message("assistant", None)]),
        "has a message without content in its prompt in row 2",
    ),
    "several": (
        [{"prompt": None}] * 3 + [{"prompt": "1+1="}] * 5,
        "has a prompt of null in row 0 (the first is 0), and 2",
    ),
    "all but one": (
        [{"prompt": ""}] * 9 + [{"prompt": "1+1="}],
        "has an empty prompt in row 0 (the first is 0), and 8",
    ),
    "the last": (filled("1+1=", None, where=9), "has a prompt of null in row 9"),
}


@pytest.mark.parametrize("case", PROMPTS)
def test_prompts_that_would_end_a_run(project, row, case):
    values, wanted = PROMPTS[case]
    project.write_rows("train.parquet", rows_of(values, row))
    assert wanted in the_problem(project, project.pipeline())


TEXTS = {
    "large": pa.large_string(),
    "dictionary": pa.dictionary(pa.int32(), pa.string()),
    "view": pa.string_view(),
}


@pytest.mark.parametrize("kind", TEXTS)
@pytest.mark.parametrize("bad", [None, ""])
def test_texts_of_every_arrow_type(project, row, kind, bad):
    table = pa.Table.from_pylist([row] * 10)
    prompts = pa.array(["1+1="] * 4 + [bad] + ["1+1="] * 5).cast(TEXTS[kind])
    pq.write_table(table.set_column(0, "prompt", prompts), project.folder / "train.parquet")
    assert " in row 4 (the first is 0)" in the_problem(project, project.pipeline())
    if kind == "view":
        return  # Arrow cannot write views in lists yet.
    messages = pa.StructArray.from_arrays([pa.array(["user"] * 10).cast(TEXTS[kind]), prompts], ["role", "content"])
    chats = pa.LargeListArray.from_arrays(pa.array(range(11), pa.int64()), messages)
    pq.write_table(table.set_column(0, "prompt", chats), project.folder / "train.parquet")
    assert " in row 4 (the first is 0)" in the_problem(project, project.pipeline())


def answers(values):
    return [{"reward_model": {"ground_truth": value, "style": "rule"}} for value in values]


RIGHT = ["2"] * 9
ANSWERS = {
    "null for exact": (
        "exact",
        answers([*RIGHT, None]),
        "a reference answer of null (reward_model.ground_truth) in row 9",
    ),
    "null for math": ("math", answers([*RIGHT, None]), "a reference answer of null"),
    "null for code": ("code", answers([*RIGHT, None]), "row 9 (the first is 0), which `reward` cannot score; remove"),
    "all null": ("exact", answers([None] * 10), "a reference answer of null (reward_model.ground_truth) in row 0"),
    "null struct": ("exact", [*answers(RIGHT), {"reward_model": None}], "a reference answer of null"),
    "empty for math": ("math", answers([*RIGHT, ""]), "an empty reference answer (reward_model.ground_truth) in row 9"),
    "blank for math": ("math", answers([*RIGHT, " \n"]), "an empty reference answer"),
    "empty for code": ("code", answers([*RIGHT, ""]), "an empty reference answer"),
    "other bytes": ("exact", answers([b"2"] * 9 + [b"\xff"]), "a reference answer of bytes that are no text"),
    "empty bytes for math": ("math", answers([b"2"] * 9 + [b""]), "an empty reference answer"),
    "NaN": ("math", answers([2.0] * 9 + [math.nan]), "a reference answer of null (reward_model.ground_truth) in row 9"),
    "null list": ("exact", answers([["2"]] * 9 + [None]), "a reference answer of null"),
    "null number": ("math", answers([2] * 9 + [None]), "a reference answer of null"),
    "all null for an own reward": (
        "m:f",
        answers([None] * 10),
        "null (reward_model.ground_truth) in each of its first 10 rows, and `reward` reads it; create the file again",
    ),
    "all empty for an own reward": ("m:f", answers([""] * 10), "an empty reference answer"),
    "all empty for exact": ("exact", answers([""] * 10), "an empty reference answer"),
}


@pytest.mark.parametrize("case", ANSWERS)
def test_answers_that_a_reward_cannot_judge_by(project, row, case):
    reward, values, wanted = ANSWERS[case]
    project.write("m.py", "def f(response, answer): return 1.0\n")
    project.write_rows("train.parquet", rows_of(values, row))
    assert wanted in the_problem(project, project.pipeline(("fn: exact}", f"fn: {reward}}}")))


READERS = {
    "a judge": (
        ("{op: reward, fn: exact}", "{op: judge, endpoint: 'http://h/v1', model: x, prompt: '{response} {answer}'}"),
        "`reward` reads it",
    ),
    "a judge's parser": (
        (
            "{op: reward, fn: exact}",
            "{op: judge, endpoint: 'http://h/v1', model: x, prompt: '{response}', parser: m:p}",
        ),
        "`reward` reads it",
    ),
    "an environment": (("n: 4,", "n: 4, environment: m:World,"), "which `reward` cannot score"),
    "an op": (("  ref: {", "  op: {op: m:op}\n  ref: {"), "which `reward` cannot score"),
}
MODULE = """\
import dagrl
class World:
    def reset(self, answer): ...
    def step(self, response): ...
def p(reply, answer): return 1.0
def free(response, **others): return 1.0
def without(response): return 1.0
@dagrl.node(reads=["answer"], writes=["bonus"])
def op(batch): ...
"""


@pytest.mark.parametrize("case", READERS)
def test_readers_of_answers_require_them(project, row, case):
    edit, wanted = READERS[case]
    project.write("m.py", MODULE)
    project.write_rows("train.parquet", rows_of(answers([None] * 10), row))
    assert wanted in the_problem(project, project.pipeline(edit))


@pytest.mark.parametrize(
    "edit",
    [
        ("{op: reward, fn: exact}", "{op: reward, fn: m:without}"),
        ("{op: reward, fn: exact}", "{op: reward, fn: m:free}"),
        ("{op: reward, fn: exact}", "{op: judge, endpoint: 'http://h/v1', model: x, prompt: '{response}'}"),
    ],
)
def test_answers_may_be_null_where_no_node_reads_them(project, row, edit):
    project.write("m.py", MODULE)
    project.write_rows("train.parquet", rows_of(answers([None] * 32), row))
    assert check_file(project.pipeline(edit)).rows == {"train": 32}


def test_some_answers_of_null_are_a_warning_for_an_own_reward(project, row):
    project.write("m.py", "def f(response, answer): return 1.0\n")
    project.write_rows("train.parquet", rows_of(answers(["2"] * 30 + [None] * 2), row))
    (warning,) = check_file(project.pipeline(("fn: exact}", "fn: m:f}"))).warnings
    assert "in row 30 (the first is 0), and 1 more like it; `reward` gets an empty text there" in warning.message


def test_a_reward_that_continues_at_errors_takes_empty_answers(project, row):
    project.write_rows("train.parquet", rows_of(answers(["2"] * 31 + [""]), row))
    check_file(project.pipeline(("fn: exact}", "fn: math, on_error: 0.0}")))


RESPONSES = {
    "null": (SFT, ["chosen"], filled("2", None, "chosen"), "has a response of null in `chosen` in row 2"),
    "all null": (
        SFT,
        ["chosen"],
        [{"chosen": None}] * 9 + [{"chosen": "2"}],
        "a response of null in `chosen` in row 0",
    ),
    "null in a struct": (
        SFT,
        ["extra_info.answer"],
        [{"extra_info": {"answer": "2"}}] * 9 + [{"extra_info": None}],
        "has a response of null in `extra_info.answer` in row 9",
    ),
    "null chat": (SFT, ["chosen"], filled(ANSWERED, None, "chosen"), "has a response of null in `chosen` in row 2"),
    "no messages": (SFT, ["chosen"], filled(ANSWERED, [], "chosen"), "has no response in `chosen` in row 2"),
    "the user's": (
        SFT,
        ["chosen"],
        filled(ANSWERED, [*ANSWERED, message("user", "?")], "chosen"),
        "has a chat in `chosen` whose last message is not the assistant's in row 2",
    ),
    "no role": (
        SFT,
        ["chosen"],
        filled(ANSWERED, [*GOOD, message(None, "2")], "chosen"),
        "is not the assistant's in row 2",
    ),
    "null at the end": (SFT, ["chosen"], filled(ANSWERED, [*GOOD, None], "chosen"), "is not the assistant's in row 2"),
    "no text": (
        SFT,
        ["chosen"],
        filled(ANSWERED, [*GOOD, message("assistant", None)], "chosen"),
        "has a response without text in `chosen` in row 2",
    ),
    "a null before it": (
        SFT,
        ["chosen"],
        filled(ANSWERED, [message("user", None), message("assistant", "2")], "chosen"),
        "has a message without content in `chosen` in row 2",
    ),
    "the second is null": (
        DPO,
        ["chosen", "rejected"],
        [{"chosen": "2", "rejected": "3" if row != 5 else None} for row in range(10)],
        "has a response of null in `rejected` in row 5",
    ),
    "another question": (
        DPO,
        ["chosen", "rejected"],
        [
            {"chosen": ANSWERED, "rejected": [message("user", "1+2=" if row == 7 else "1+1="), ANSWERED[1]]}
            for row in range(10)
        ],
        "has chats that differ before their responses in row 7",
    ),
    "a longer question": (
        DPO,
        ["chosen", "rejected"],
        [{"chosen": ANSWERED, "rejected": [*GOOD, *ANSWERED] if row == 7 else ANSWERED} for row in range(10)],
        "has chats that differ before their responses in row 7",
    ),
    "an empty prompt beside": (
        SFT,
        ["chosen"],
        [{"chosen": "2", "prompt": "" if row == 3 else "1+1="} for row in range(10)],
        "has an empty prompt in row 3",
    ),
}


EMPTY = {"text": ("2", ""), "chat": (ANSWERED, [*GOOD, message("assistant", "")])}


@pytest.mark.parametrize("kind", EMPTY)
def test_empty_responses_are_a_warning_and_an_error_where_all_are(project, kind):
    good, bad = EMPTY[kind]
    project.write_rows("train.parquet", [{"prompt": "1+1=", "chosen": each} for each in [good] * 9 + [bad]])
    path = offline(project, SFT, ["chosen"])
    (warning,) = [each for each in check_file(path).warnings if each.place == "data.train"]
    assert "an empty response in `chosen` in row 9 (the first is 0); the policy learns" in warning.message
    project.write_rows("train.parquet", [{"prompt": "1+1=", "chosen": bad}] * 9)
    assert "an empty response in `chosen` in each of its first 9 rows; create" in the_problem(project, path)


def offline(project, nodes, columns):
    data = f"  max_prompt_tokens: 16\n  responses: [{', '.join(columns)}]\n  max_response_tokens: 6\n"
    return project.pipeline((NODES, nodes), ("  max_prompt_tokens: 16\n", data), *OFFLINE)


@pytest.mark.parametrize("case", RESPONSES)
def test_responses_that_would_end_a_run(project, case):
    nodes, columns, values, wanted = RESPONSES[case]
    project.write_rows("train.parquet", [{"prompt": "1+1=", **value} for value in values])
    assert wanted in the_problem(project, offline(project, nodes, columns))


def test_a_chat_with_a_response_alone_has_no_prompt(project):
    project.write_rows("train.parquet", [{"chosen": ANSWERED}] * 8 + [{"chosen": ANSWERED[1:]}])
    path = offline(project, SFT, ["chosen"])
    assert "has a chat in `chosen` with nothing before its response in row 8" in the_problem(project, path)
    # With a column `prompt`, the response answers that.
    project.write_rows("train.parquet", [{"prompt": "1+1=", "chosen": ANSWERED[1:]}] * 8)
    check_file(path)


CALLS = {"tool_calls": [{"function": {"name": "add", "arguments": "{}"}}]}
"""Fields of a message that calls a tool."""


@pytest.mark.parametrize("before", [[], [{**message("assistant", None), **CALLS}, message("tool", "2")]])
@pytest.mark.parametrize("last", [{**message("assistant", None), **CALLS}, message("assistant", "2")])
def test_a_message_of_calls_needs_no_content(project, before, last):
    rows = [{"chosen": [*GOOD, *before, last]} for _ in range(9)]
    project.write_rows("train.parquet", rows)
    check_file(offline(project, SFT, ["chosen"]))


def test_behind_the_scanned_rows_messages_of_calls_have_no_content(project, row, monkeypatch):
    monkeypatch.setattr("dagrl.validation.data_rows.SCANNED_ROWS", 1)
    monkeypatch.setattr("dagrl.validation.sampled_files._BATCH_ROWS", 1)
    chat = [*GOOD, {**message("assistant", None), **CALLS}, message("tool", "2")]
    pq.write_table(pa.Table.from_pylist(rows_of([{"prompt": chat}] * 9, row)), project.folder / "train.parquet", 3)
    check_file(project.pipeline())


def test_chats_as_maps_are_read_as_chats(project):
    maps = pa.list_(pa.map_(pa.string(), pa.string()))
    for last, wanted in (("assistant", None), ("user", "whose last message is not the assistant's in row 0")):
        chats = pa.array([[list(message("user", "1+1=").items()), list(message(last, "2").items())]], maps)
        pq.write_table(pa.table({"chosen": chats}), project.folder / "train.parquet")
        path = offline(project, SFT, ["chosen"])
        if wanted:
            assert wanted in the_problem(project, path)
        else:
            check_file(path)


@pytest.mark.parametrize("bad", [[message("user", None)], [message("user", [{"type": "text", "text": "x"}])]])
def test_chats_in_json_are_read_as_chats(project, row, bad):
    project.write_rows("train.parquet", rows_of(filled(json.dumps(GOOD), json.dumps(bad)), row))
    assert "has a message without content in its prompt in row 2" in the_problem(project, project.pipeline())


@pytest.mark.parametrize("answer", ["2", None])
def test_right_answers_are_accepted(project, answer):
    rows = [
        {
            "prompt": [message("system", ""), *GOOD] * (1 + row % 3),
            "data_source": None if row % 2 else "sums",
            "reward_model": {"ground_truth": "2"},
            "extra_info": {"any": [None, row]},
        }
        for row in range(100)
    ]
    project.write_rows("train.parquet", rows)
    assert check_file(project.pipeline()).rows == {"train": 100}
    pairs = [{"chosen": GOOD * row + ANSWERED, "rejected": GOOD * row + ANSWERED, "x": answer} for row in range(50)]
    project.write_rows("train.parquet", pairs)
    assert check_file(offline(project, DPO, ["chosen", "rejected"])).rows == {"train": 50}


@pytest.mark.parametrize(("bad", "what"), [(None, "a prompt of null"), ("", "an empty prompt")])
def test_validation_files_are_looked_at_too_whatever_is_drawn_of_them(project, row, bad, what):
    project.write_rows("val.parquet", rows_of(filled("1+1=", bad, where=6), row))
    path = project.pipeline(("  prompts_per_step", "  val: {sums: val.parquet} #!\n  prompts_per_step"))
    project.assert_problem(path, "data.val.sums", f"val.parquet has {what} in row 6")
    project.only_problem(path, "data.val_prompts=1")


def test_behind_the_scanned_rows_statistics_tell_of_nulls(project, row, monkeypatch):
    monkeypatch.setattr(data_rows, "SCANNED_BYTES", 100)
    monkeypatch.setattr(sampled_files, "_BATCH_BYTES", 1)
    values = ["1+1="] * 40
    values[33] = None
    table = pa.Table.from_pylist(rows_of([{"prompt": value} for value in values], row))
    path = project.folder / "train.parquet"
    pq.write_table(table, path, row_group_size=10)
    assert "has a prompt of null between row 30 and row 39 (the first is 0); a run" in the_problem(
        project, project.pipeline()
    )
    pq.write_table(table, path, row_group_size=10, write_statistics=False)
    check_file(project.pipeline())
    nulls = [{"prompt": GOOD, "reward_model": {"ground_truth": None if number == 25 else "2"}} for number in range(40)]
    pq.write_table(pa.Table.from_pylist(rows_of(nulls, row)), path, row_group_size=10)
    assert "between row 20 and row 29" in the_problem(project, project.pipeline())
    pq.write_table(
        pa.Table.from_pylist(rows_of([{"prompt": GOOD}] * 35 + [{"prompt": []}] * 5, row)), path, row_group_size=10
    )
    assert "a prompt, or a message of one, that is null between row 30" in the_problem(project, project.pipeline())


def test_files_without_faults_are_read_without_pandas(project):
    """It takes half a second to import, and Arrow does so for some of its functions."""
    rows = [{"prompt": GOOD, "reward_model": {"ground_truth": "2"}, "a": ANSWERED, "b": ANSWERED}] * 9
    path = project.write_rows("train.parquet", rows)
    code = (
        "import sys, pathlib\nfrom dagrl.config.loading.prompt_files import PromptFile\n"
        "from dagrl.config.schema import SourceSpec\nfrom dagrl.validation.sampled_files import sampled\n"
        "from dagrl.validation.data_rows import CheckedColumns, row_faults\n"
        f"path = pathlib.Path({str(path)!r})\nwith sampled(PromptFile(path, 'parquet')) as file:\n"
        "    found = row_faults(file, CheckedColumns(SourceSpec(path=path), True, ('a', 'b'), True, True))\n"
        "assert (found.scanned, found.faults) == (9, {}), found\nassert 'pandas' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_scan_is_bounded(project, row):
    big = [{**row, "prompt": f"{number:0100000}"} for number in range(500)]
    project.write_rows("train.parquet", big)
    path = project.folder / "train.parquet"
    with sampled_files.sampled(PromptFile(path, "parquet")) as file:
        columns = data_rows.CheckedColumns(SourceSpec(path=path), prompt=True, answers=True)
        found = data_rows.row_faults(file, columns)
    assert 16 << 20 <= found.scanned * 100_000 <= 24 << 20


@pytest.mark.parametrize("value", [5, {"a": 1}, ["a"], True])
def test_responses_and_images_of_other_types_are_flaws(tmp_path, value):
    path = tmp_path / "a.jsonl"
    rows = [{"reply": "2", "images": []}, {"reply": value, "images": []}, {"reply": "2", "images": 5}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with sampled_files.sampled(PromptFile(path, "json")) as file:
        columns = data_rows.CheckedColumns(SourceSpec(path=path), prompt=False, responses=("reply",), images="images")
        found = data_rows.row_faults(file, columns)
    assert [found.sentence(what) for what in found.faults] == [
        "has a response in `reply` that is neither text nor a list of messages in line 2",
        "has a value of `images` that is no list of images in line 3",
    ]


def break_pages(path):
    """The footer stays, the pages before it are zeros."""
    whole = bytearray(path.read_bytes())
    footer = int.from_bytes(whole[-8:-4], "little") + 8
    whole[4:-footer] = bytes(len(whole) - footer - 4)
    path.write_bytes(whole)


def two_columns(name):
    def make(path):
        table = pq.read_table(path)
        table = table if name in table.column_names else table.append_column(name, table["prompt"])
        pq.write_table(table.append_column(name, table[name]), path)

    return make


FILES = {
    "pages of zeros": (break_pages, "cannot be read as parquet ("),
    "two columns of a name": (two_columns("prompt"), "has 2 columns `prompt`; keep one of them"),
    "two columns with answers": (two_columns("reward_model"), "has 2 columns `reward_model`; keep one of them"),
    "two columns with sources": (two_columns("data_source"), "has 2 columns `data_source`; keep one of them"),
    "two columns with more": (two_columns("extra_info"), "has 2 columns `extra_info`; keep one of them"),
    "a pointer": (
        lambda path: path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"),
        "is a pointer of Git LFS; fetch the file with `git lfs pull`",
    ),
    "gzip": (
        lambda path: path.write_bytes(b"\x1f\x8b\x08" + bytes(20)),
        "train.parquet:1 cannot be unpacked (",
    ),
    "a pipe": (lambda path: (path.unlink(), os.mkfifo(path)), "is not a regular file; give a file with prompts"),
    "a loop": (lambda path: (path.unlink(), path.symlink_to(path)), "does not exist; check the path"),
    "a torn footer": (lambda path: path.write_bytes(path.read_bytes()[:-1]), "cannot be read as parquet ("),
    "a footer of noise": (
        lambda path: path.write_bytes(b"PAR1" + b"\x99" * 40 + (40).to_bytes(4, "little") + b"PAR1"),
        "cannot be read as parquet (",
    ),
    "a footer longer than the file": (
        lambda path: path.write_bytes(b"PAR1" + (1 << 30).to_bytes(4, "little") + b"PAR1"),
        "cannot be read as parquet (",
    ),
    "nothing but nulls": (
        lambda path: pq.write_table(pa.table({"prompt": pa.nulls(3), "data_source": pa.nulls(3)}), path),
        "has prompts of type null; they must be text",
    ),
    "no columns": (lambda path: pq.write_table(pa.table({}), path), "has no column `prompt`"),
    "jsonl with nulls": (
        lambda path: path.write_text('{"prompt": null}\n\n'),
        "has prompts of type null; they must be text",
    ),
    "a page of a site": (lambda path: path.write_text("<!DOCTYPE html>"), "cannot be read as parquet ("),
    "binary prompts": (
        lambda path: pq.write_table(
            pa.table({"prompt": [b"1"], "data_source": ["s"], "reward_model": [{"ground_truth": "1"}]}), path
        ),
        "has prompts of type binary; they must be text",
    ),
    "messages of lists": (
        lambda path: pq.write_table(
            pa.table({"prompt": [[["user", "1"]]], "data_source": ["s"], "reward_model": [{"ground_truth": "1"}]}), path
        ),
        "has prompts of type list<",
    ),
}


@pytest.mark.parametrize("case", FILES)
def test_files_that_are_no_prompts(project, case):
    spoil, wanted = FILES[case]
    spoil(project.folder / "train.parquet")
    path = project.pipeline()
    problems = [each for each in project.problems(path) if each.place == "data.train"]
    assert any(wanted in each.message for each in problems), problems
    assert all("; " in each.message and "\n" not in str(each) for each in problems)
