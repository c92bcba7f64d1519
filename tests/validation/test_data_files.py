from pathlib import Path

import pytest

from dagrl.validation import check_file


def data_problems(project, name):
    path = project.pipeline(("train.parquet", f"{name} #!"))
    problems = project.problems(path)
    assert {(problem.line, problem.place) for problem in problems} == {(6, "data.train")}
    assert all("; " in problem.message for problem in problems)
    return [problem.message.removeprefix(f"{project.folder}/") for problem in problems]


def test_a_missing_file(project):
    (message,) = data_problems(project, "gone.parquet")
    assert message.startswith("gone.parquet does not exist; check the path, or create the file with `dagrl data NAME ")


SCRIPTS = sorted(path.stem for path in (Path(__file__).parents[2] / "data_preprocess").glob("*.py"))


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_missing_file_names_its_script(project, name):
    (message,) = data_problems(project, f"{name}/train.parquet")
    assert message.endswith(f"with `dagrl data {name} --local_dir {project.folder}/{name}`")


def test_a_file_in_a_folder_of_many_names_its_script(project):
    (message,) = data_problems(project, "files/gsm8k_test.parquet")
    assert "with `dagrl data gsm8k --local_dir " in message


def test_a_folder(project):
    (project.folder / "data").mkdir()
    (message,) = data_problems(project, "data")
    assert message.startswith("data is a folder without prompt files (")
    project.write_rows("data/test.parquet", [{"x": 1}])
    assert data_problems(project, "data") == [
        "data has files of `test`, and none of `train`; set `split`, or name the files"
    ]


@pytest.mark.parametrize(
    ("content", "fragment"),
    [
        (b"", "bad.parquet is empty (0 bytes); create it again"),
        (
            b"PAR1 and then nothing of use",
            "bad.parquet cannot be read as parquet (Parquet magic bytes not found in footer",
        ),
        (b"PAR1", "bad.parquet cannot be read as parquet ("),
        (b"\x00" * 100, "bad.parquet cannot be read as parquet ("),
        (
            b'{"question": "?"}\n',
            "bad.parquet has no column `prompt`; choose from: question, or set prompt_key",
        ),
    ],
)
def test_a_file_that_is_no_parquet(project, content, fragment):
    (project.folder / "bad.parquet").write_bytes(content)
    message, *_ = data_problems(project, "bad.parquet")
    assert message.startswith(fragment)


def test_a_parquet_file_cut_short(project):
    whole = (project.folder / "train.parquet").read_bytes()
    (project.folder / "torn.parquet").write_bytes(whole[: len(whole) // 2])
    (message,) = data_problems(project, "torn.parquet")
    assert message.startswith("torn.parquet cannot be read as parquet (")


def test_no_rows(project, row):
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.Table.from_pylist([row]).slice(0, 0), project.folder / "none.parquet")
    assert data_problems(project, "none.parquet") == ["none.parquet has no rows; create the file again"]


def test_missing_columns_and_wrong_types_are_all_reported(project, row):
    project.write_rows("a.parquet", [{"promt": "x", "reward_model": {"groundtruth": "2"}}])
    assert data_problems(project, "a.parquet") == [
        "a.parquet has no column `prompt`; did you mean `promt`?, or set prompt_key",
        "a.parquet has no column `reward_model.ground_truth`; did you mean `reward_model.groundtruth`?, "
        "or set answer_key",
    ]
    project.write_rows("b.parquet", [{"prompt": 3, "data_source": 4, "reward_model": "2"}])
    assert data_problems(project, "b.parquet") == [
        "b.parquet has a data_source of type int64; it must be text",
        "b.parquet has no column `reward_model.ground_truth`; did you mean `reward_model`?, or set answer_key",
        "b.parquet has prompts of type int64; they must be text, or lists of messages with role and content",
    ]
    project.write_rows("c.parquet", [{**row, "prompt": [{"role": "user"}]}])
    (message,) = data_problems(project, "c.parquet")
    assert message.startswith("c.parquet has prompts of type list<")


def test_chats_and_the_validation_file_are_accepted(project, row):
    project.write_rows("chat.parquet", [{**row, "prompt": [{"role": "user", "content": "1+1="}]}] * 3)
    checked = check_file(project.folder / "p.yaml", [f"data.val={project.folder}/chat.parquet", "run.validate_every=2"])
    assert checked.rows == {"train": 32, "val": 3}
