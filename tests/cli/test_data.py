"""`dagrl data`: the scripts of data_preprocess/ as a command."""

import json
import sys

import pyarrow.parquet as pq
import pytest

from dagrl.cli import main
from dagrl.resources import data_script_names

MADE = ("arithmetic", "digits", "games", "word_problems")
"""Scripts that make their data."""


@pytest.mark.parametrize("name", data_script_names())
def test_user_errors_end_every_script_with_2(name, tmp_path, capsys):
    (tmp_path / "file").touch()
    options = ["--local_dir", str(tmp_path / "file" / "data")]
    options += ["--game", "Nothing-v1"] if name == "games" else []
    options += ["--source", str(tmp_path / "nowhere")] if name not in MADE else []
    assert main(["data", name, *options]) == 2
    (sentence,) = capsys.readouterr().err.splitlines()
    assert sentence.startswith(f"{name}.py: ")


def test_statistics_of_files_are_printed_as_text_and_json(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name, questions in (("train", ["One?", "Two?", "two? "]), ("val", ["ONE?", "Three?"])):
        rows = [{"question": each, "answer": f"#### {number}"} for number, each in enumerate(questions)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    call = ["data", "stats", str(tmp_path / "train.jsonl"), "--val", str(tmp_path / "val.jsonl")]
    assert main(call) == 0
    text = capsys.readouterr().out
    assert f"{tmp_path}/train.jsonl: 3 rows\n  prompts (`question`) in characters: mean 4, median 4," in text
    assert f"  same prompt as an earlier row: 1 ({tmp_path}/train.jsonl:3)\n    with another answer: 1 (" in text
    assert f"  same prompt as a training row: 1 ({tmp_path}/val.jsonl:1)\n" in text
    assert main([*call, "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["val"][0]["also_in_train"] == {"rows": 1, "places": [f"{tmp_path}/val.jsonl:1"]}
    assert values["train"][0]["rewards"] == {"math": 3}
    assert main([*call, "--prompt-key", "text"]) == 2
    (sentence,) = capsys.readouterr().err.splitlines()
    assert sentence.startswith(f"dagrl data stats: {tmp_path}/train.jsonl has no column `text`")


def test_validation_prompts_of_a_folder_are_those_of_its_test_split(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "data"
    folder.mkdir()
    for split, questions in (("train", ["One?", "Two?"]), ("test", ["Two?", "Three?", "Four?"])):
        rows = [{"question": each, "answer": "1"} for each in questions]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["data", "stats", str(folder), "--val", str(folder), "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert (values["train"][0]["rows"], values["val"][0]["rows"]) == (2, 3)
    assert values["val"][0]["also_in_train"] == {"rows": 1, "places": [f"{folder}/test.jsonl:1"]}


ENVIRONMENT = """
class Sums:
    def __init__(self, most):
        self.most = most

    async def solve(self, client, row): ...

    def rows(self):
        print("noise")
        for number in range(self.most):
            prompt = [{"role": "user", "content": f"{number}+1="}]
            yield {"prompt": prompt, "answer": number + 1, "data_source": "sums", "extra_info": {"number": number}}
"""


def test_the_tasks_of_an_environment_become_a_data_file(tmp_path, capsys, monkeypatch):
    (tmp_path / "sums.py").write_text(ENVIRONMENT)
    monkeypatch.chdir(tmp_path)
    call = ["data", "environment", "sums:Sums", "--python", sys.executable, "--out", "data/sums.parquet", "--args"]
    assert main([*call, '{"most": 2}']) == 0
    assert capsys.readouterr().out == "data/sums.parquet: 2 rows\n"
    _, second = pq.read_table("data/sums.parquet").to_pylist()
    assert second == {
        "data_source": "sums",
        "prompt": [{"content": "1+1=", "role": "user"}],
        "ability": "environment",
        "reward_model": {"ground_truth": "2", "style": "rule"},
        "extra_info": {"number": 1},
    }
    for args, said in (
        ("3", "--args is not an object: 3; "),
        ("{", "--args is not JSON"),
        ('{"most": 0}', "the environment has no tasks; "),
        (
            '{"least": 0}',
            "cannot run sums:Sums: TypeError: Sums.__init__() got an unexpected keyword argument 'least'; ",
        ),
    ):
        assert main([*call, args]) == 2
        (sentence,) = capsys.readouterr().err.splitlines()
        assert said in sentence
