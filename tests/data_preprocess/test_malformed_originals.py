"""Originals with nulls, blanks and broken files: a row that is dropped and counted, or one sentence."""

from __future__ import annotations

import json
import math

import pytest

QUESTION = {"role": "user", "content": "q"}
ROWS = {
    "aime": ("test.jsonl", {"problem": "p", "answer": "1"}),
    "amc": ("test.jsonl", {"problem": "p", "answer": 1.0}),
    "apps": ("train.jsonl", {"question": "q", "input_output": '{"inputs": ["1"], "outputs": ["2"]}'}),
    "dapo_math": (
        "train.jsonl",
        {"data_source": "d", "prompt": [QUESTION], "reward_model": {"ground_truth": "1"}, "extra_info": None},
    ),
    "deepscaler": ("train.jsonl", {"problem": "p", "answer": ["1"], "solution": None}),
    "gsm8k": ("train.jsonl", {"question": "q", "answer": "#### 1"}),
    "gsm8k_tools": ("train.jsonl", {"question": "q", "answer": "#### 1"}),
    "math_dataset": ("train.jsonl", {"problem": "p", "solution": r"\boxed{1}"}),
    "mbpp": ("mbpp.jsonl", {"task_id": 700, "text": "t", "test_list": ["assert f() == 1"]}),
    "ultrafeedback": (
        "train.jsonl",
        {name: [QUESTION, {"role": "assistant", "content": name}] for name in ("chosen", "rejected")},
    ),
}
DEEP = b"[" * 100_000


def cases():
    for name, (_, row) in ROWS.items():
        for key in row:
            for bad in (None, "", [], {}, math.nan, math.inf, [None]):
                yield pytest.param(name, key, bad, id=f"{name}-{key}-{bad}")


@pytest.mark.parametrize(("name", "key", "bad"), [*cases()])
def test_no_row_without_a_question_or_an_answer_is_written(originals, load_script, tmp_path, name, key, bad):
    file, row = ROWS[name]
    folder = originals(**{file.replace(".", "_DOT_"): [{**row, key: bad}]})
    split = "test" if file.startswith("test") else "train"
    out = tmp_path / "out"
    try:
        load_script(name).main(["--local_dir", str(out), "--source", str(folder), "--splits", split])
    except SystemExit as stopped:
        assert stopped.code == 2
        assert "\n" not in str(stopped)
        assert not list(out.glob("*.parquet"))
        return
    import pyarrow.parquet as pq

    (written,) = pq.read_table(out / f"{split}.parquet").to_pylist()
    assert any(message["content"].strip() for message in written["prompt"])
    answers = [written["reward_model"]["ground_truth"]] if name != "ultrafeedback" else [written["chosen"]]
    assert all(answer and answer not in ("nan", "None") for answer in answers)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("train.jsonl", DEEP, "train.jsonl:1: not a line of JSON: maximum recursion depth exceeded"),
        ("train.json", DEEP, "train.json: not JSON: maximum recursion depth exceeded"),
        (
            "train.jsonl",
            b'{"question": "q", "answer": "#### 1"}\nnull\n',
            ":2: not an object with fields, but null; mend",
        ),
        ("train.json", b"[null]", "row 0 (the first is 0): not an object with fields, but null; mend the row"),
        (
            "train.parquet",
            b"version https://git-lfs.github.com/spec/v1\n",
            "is a pointer of Git LFS; fetch the file with",
        ),
        (
            "train.jsonl",
            b"version https://git-lfs.github.com/spec/v1\n",
            "is a pointer of Git LFS; fetch the file with",
        ),
    ],
)
def test_files_that_are_broken(originals, load_script, tmp_path, file, content, message):
    folder = originals()
    (folder / file).write_bytes(content)
    with pytest.raises(SystemExit) as stopped:
        load_script("gsm8k").main(["--local_dir", str(tmp_path / "out"), "--source", str(folder)])
    assert message in str(stopped.value)


@pytest.mark.parametrize("deep", [DEEP.decode(), json.dumps({"inputs": 1})])
def test_tests_that_cannot_be_read_are_dropped(originals, load_script, tmp_path, deep):
    good = ROWS["apps"][1]
    folder = originals(train_DOT_jsonl=[good, {**good, "input_output": deep}, {**good, "solutions": deep}])
    load_script("apps").main(["--local_dir", str(tmp_path / "out"), "--source", str(folder), "--splits", "train"])
    report = json.loads((tmp_path / "out/report.json").read_text())["splits"]["train"]
    assert (report["read"], report["kept"]) == (3, 2)
