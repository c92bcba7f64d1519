"""Sources of prompts that a run cannot use: missing and broken files, and columns that are not there."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys

import datasets
import pytest

from dagrl.config.schema import SourceSpec
from dagrl.validation import check_file
from dagrl.validation.data_files import holds_chats
from dagrl.validation.summary import as_values, summarize

LINE = '{"question": "1+1=", "answer": "2"}\n'
KEYS = "prompt_key: question, answer_key: answer"


@pytest.fixture
def folder(project):
    """Files of several formats with the same rows."""
    (project.folder / "a.jsonl").write_text(LINE * 3)
    (project.folder / "b.jsonl.gz").write_bytes(gzip.compress(LINE.encode() * 4))
    (project.folder / "c.json").write_text(json.dumps([json.loads(LINE)] * 5))
    project.write_rows("d.parquet", [json.loads(LINE)] * 6)
    datasets.Dataset.from_list([json.loads(LINE)] * 7).save_to_disk(str(project.folder / "e"))
    return project.folder


def pipeline(project, train):
    return project.pipeline(("train: train.parquet", f"train: {train} #!"))


def test_sources_of_all_formats_are_counted(project, folder):
    train = f"{{first: {{path: [a.jsonl, b.jsonl.gz], {KEYS}}}, second: {{path: [c.json, d.parquet, e], {KEYS}}}}}"
    checked = check_file(pipeline(project, train), [f"data.val={folder}/train.parquet", "run.validate_every=2"])
    assert checked.rows == {"train.first": 7, "train.second": 18, "val": 32}
    assert "a.jsonl and 1 more" in summarize(checked)
    assert as_values(checked)["data"]["train.second"]["prompts"] == 18


PROBLEMS = {
    "a missing file of several": ("[train.parquet, gone.parquet]", "gone.parquet does not exist; check the path"),
    "a pattern without files": ("['*.pqt']", "no file matches "),
    "a folder of other files": ("{path: other}", "is a folder without prompt files ("),
    "a column that is not there": (
        "{path: a.jsonl, prompt_key: qestion, answer_key: answer}",
        "mean `question`?, or set prompt_key",
    ),
    "an answer that is not there": ("{path: a.jsonl, prompt_key: question}", "no column `reward_model.ground_truth`; "),
    "a field that is not there": (
        "{path: train.parquet, answer_key: reward_model.truth}",
        "no column `reward_model.truth`; did you mean `reward_model.ground_truth`?",
    ),
    "another column in one file": (
        f"{{path: [a.jsonl, renamed.jsonl], {KEYS}}}",
        "renamed.jsonl has no column `question`",
    ),
    "half a gzip": (f"{{path: half.jsonl.gz, {KEYS}}}", "half.jsonl.gz:"),
    "a broken line": (
        f"{{path: broken.jsonl, {KEYS}}}",
        "broken.jsonl:2: no row of JSON (Expecting value at column 14)",
    ),
    "an empty question": (f"{{path: empty.jsonl, {KEYS}}}", "has an empty prompt in line 3"),
    "no answer": (
        f"{{path: [a.jsonl, null.jsonl], {KEYS}}}",
        "null.jsonl has a reference answer of null (answer) in line 3",
    ),
    "a number as question": (f"{{path: number.jsonl, {KEYS}}}", "has prompts of type int64; they must be text"),
    "a chat of answers alone": (f"{{path: chat.jsonl, {KEYS}}}", "has an empty prompt in line 1"),
}


@pytest.mark.parametrize("case", PROBLEMS)
def test_files_that_a_run_cannot_use(project, folder, case):
    train, message = PROBLEMS[case]
    (folder / "other").mkdir()
    (folder / "other/notes.txt").write_text("notes")
    (folder / "half.jsonl.gz").write_bytes(gzip.compress(LINE.encode() * 4)[:-6])
    (folder / "broken.jsonl").write_text(LINE + '{"question": }\n' + LINE)
    (folder / "empty.jsonl").write_text(LINE + '\n{"question": "", "answer": "2"}\n')
    (folder / "null.jsonl").write_text(LINE + '\n{"question": "1", "answer": null}\n')
    (folder / "renamed.jsonl").write_text('{"problem": "1", "answer": "2"}\n')
    (folder / "number.jsonl").write_text('{"question": 1, "answer": "2"}\n')
    chat = [{"role": "assistant", "content": "2"}]
    (folder / "chat.jsonl").write_text(json.dumps({"question": chat, "answer": "2"}) + "\n")
    project.assert_problem(pipeline(project, train), "data.train", message)


MIXED = {
    "a number as prompt": ({"question": 5}, "a prompt that is neither text nor a list of messages"),
    "an object as prompt": ({"question": {"role": "user", "content": "1"}}, "a prompt that is neither"),
    "a list of texts as prompt": ({"question": ["a", "b"]}, "a prompt that is neither"),
    "a text for a struct": ({"answer": "2"}, "a value of `answer` that is no struct with the field truth"),
    "a list for a struct": ({"answer": [{"truth": "2"}]}, "a value of `answer` that is no struct"),
    "a number as data source": ({"data_source": 5}, "a data_source that is no text"),
}


@pytest.mark.parametrize("case", MIXED)
@pytest.mark.parametrize("ending", ["jsonl", "json"])
def test_rows_whose_types_differ_from_the_first(project, case, ending):
    values, message = MIXED[case]
    good = {"question": "1+1=", "answer": {"truth": "2"}, "data_source": "sums"}
    rows = [json.dumps(each) for each in [*[good] * 300, {**good, **values}, {**good, **values}]]
    text = "\n".join(rows) if ending == "jsonl" else f"[{','.join(rows)}]"
    (project.folder / f"a.{ending}").write_text(text)
    place = "line 301" if ending == "jsonl" else "row 300 (the first is 0)"
    path = pipeline(project, f"{{path: a.{ending}, prompt_key: question, answer_key: answer.truth}}")
    project.assert_problem(path, "data.train", f"a.{ending} has {message}", f" in {place}, and 1 more like it; ")


def test_json_is_checked_without_pandas(project, folder):
    """It takes a second to import, and Arrow does so for some of its functions."""
    path = pipeline(project, f"{{path: [a.jsonl, b.jsonl.gz, c.json], {KEYS}}}")
    code = f"import sys\nfrom dagrl.validation import check_file\ncheck_file({str(path)!r})\n"
    subprocess.run([sys.executable, "-c", code + "assert 'pandas' not in sys.modules"], check=True)


def test_a_source_is_named_by_its_key(project, folder):
    path = project.pipeline(("train: train.parquet", "train:\n    first: train.parquet\n    second: gone.parquet #!"))
    project.assert_problem(path, "data.train.second", "wrong-data-file")


def test_many_files_share_the_time_of_a_few(project, row, monkeypatch):
    monkeypatch.setattr("dagrl.validation.data_rows.SCANNED_ROWS", 8)
    monkeypatch.setattr("dagrl.validation.sampled_files._BATCH_ROWS", 1)
    (project.folder / "many").mkdir()
    for number in range(40):
        project.write_rows(f"many/{number:02}.parquet", [row] * 3)
    project.write_rows("many/17.parquet", [row, {**row, "prompt": ""}, row])
    assert check_file(pipeline(project, "many")).rows == {"train": 120}
    project.write_rows("many/17.parquet", [{**row, "prompt": ""}, row, row])
    project.assert_problem(pipeline(project, "many"), "data.train", "17.parquet has an empty prompt in row 0")


@pytest.mark.parametrize("change", ["reward_model", "data_source"])
def test_the_columns_of_each_of_many_files_are_checked(project, row, change):
    (project.folder / "many").mkdir()
    for number in range(70):
        project.write_rows(f"many/{number:02}.parquet", [row])
    # Its rows are not checked.
    row = {**row, change: 5} if change == "data_source" else {name: row[name] for name in row if name != change}
    for number in ("07", "21"):
        project.write_rows(f"many/{number}.parquet", [row])
    wanted = {
        "reward_model": "has no column `reward_model.ground_truth`",
        "data_source": "has a data_source of type int64",
    }
    project.assert_problem(pipeline(project, "many"), "data.train", f"07.parquet {wanted[change]}")


def test_a_system_message_needs_a_chat_template(project, folder):
    chats = [{"question": [{"from": "human", "value": "1+1="}], "answer": "2"}]
    project.write_rows("chats.parquet", chats)
    assert holds_chats(SourceSpec(path=folder / "chats.parquet", prompt_key="question"), ())
    assert holds_chats(SourceSpec(path=folder / "a.jsonl", system_prompt="Add."), ())
    assert not holds_chats(SourceSpec(path=folder / "a.jsonl", prompt_key="question"), ())
    assert not holds_chats(SourceSpec(path=folder / "gone.jsonl"), ())


@pytest.mark.parametrize(
    ("train", "place", "code"),
    [
        ("{hub: me/gone}", "data.train", "no-such-data-set"),
        ("{hub: me/sums, split: trian}", "data.train", "no-such-data-set"),
    ],
)
def test_data_sets_that_the_hub_does_not_have(project, monkeypatch, train, place, code):
    real = datasets.load_dataset_builder

    def load(name, config, revision=None):
        if name == "me/gone":
            raise datasets.exceptions.DatasetNotFoundError("Dataset 'me/gone' doesn't exist on the Hub.")
        return real(str(project.folder))

    monkeypatch.setattr(datasets, "load_dataset_builder", load)
    project.assert_problem(pipeline(project, train), place, code)


def test_epochs_need_the_rows_of_files(project, monkeypatch):
    real = datasets.load_dataset_builder
    monkeypatch.setattr(datasets, "load_dataset_builder", lambda *names, revision=None: real(str(project.folder)))
    path = project.pipeline(
        ("train: train.parquet", "train: {hub: me/sums}"), ("run: {steps: 10}", "run: {epochs: 2} #!")
    )
    project.assert_problem(path, "run.epochs", "unknown-rows", "set `steps`")
