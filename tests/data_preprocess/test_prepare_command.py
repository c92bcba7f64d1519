"""What all scripts share: whole files or none, one sentence for each error, a report that adds up."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pyarrow.parquet as pq
import pytest

ROOT = Path(__file__).parents[2]


def question(number: int, text: str = "How many?") -> dict[str, str]:
    return {"question": f"{number}. {text}", "answer": f"So many.\n#### {number}"}


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def fails(load_script: Callable[[str], ModuleType], tmp_path: Path, capsys) -> Callable[..., str]:
    """Run gsm8k.py, expect it to refuse, and return its one sentence."""

    def run(*options: str) -> str:
        with pytest.raises(SystemExit) as stopped:
            load_script("gsm8k").main(["--local_dir", str(tmp_path / "out"), *options])
        assert stopped.value.code == 2
        return capsys.readouterr().err.splitlines()[-1].removeprefix("gsm8k.py: ")

    return run


def test_the_report_adds_up(originals, prepared, tmp_path: Path, capsys) -> None:
    bad = [{"question": " ", "answer": "#### 1"}, {"question": "Why?", "answer": "Because."}] * 2
    rows = [question(1), *bad, question(2, "x" * 300), question(3)]
    prepared("gsm8k", originals(train_DOT_jsonl=rows, test_DOT_jsonl=[question(4)]), "--instruction", "")
    report = json.loads((tmp_path / "out" / "report.json").read_text())["splits"]
    train = report["train"]
    assert (train["read"], train["kept"]) == (7, 3)
    assert train["dropped"] == {"no question": 2, 'no final answer after "####"': 2}
    assert report["test"]["kept"] == 1
    assert "train.parquet: 3 rows; dropped 2: no question; dropped 2: no final answer" in capsys.readouterr().out


def test_limit_and_splits_read_less(originals, prepared) -> None:
    folder = originals(train_DOT_jsonl=[question(number) for number in range(9)])
    rows = prepared("gsm8k", folder, "--splits", "train", "--limit", "4")
    assert {split: len(kept) for split, kept in rows.items()} == {"train": 4}


@pytest.fixture
def half_way(originals, prepared, tmp_path: Path) -> Iterator[subprocess.Popen]:
    """A run over finished files that has written train.parquet and half of test.parquet, and waits."""
    folder = originals(train_DOT_jsonl=[question(1)], test_DOT_jsonl=[question(2)])
    prepared("gsm8k", folder)
    originals(train_DOT_jsonl=[question(number) for number in range(3)])
    (folder / "test.jsonl").unlink()
    # Its reader waits for more lines, so the run stands between the first and the last row group.
    os.mkfifo(folder / "test.jsonl")
    out = tmp_path / "out"
    command = [sys.executable, "data_preprocess/gsm8k.py", "--local_dir", str(out), "--source", str(folder)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    with (folder / "test.jsonl").open("w") as pipe:
        for number in range(9000):
            print(json.dumps(question(number)), file=pipe)
        pipe.flush()
        unfinished = out / ".unfinished" / ".test.parquet.unfinished"
        deadline = time.monotonic() + 60
        while not (unfinished.exists() and unfinished.stat().st_size > 1000):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
        assert (out / ".unfinished" / "train.parquet").exists()
        yield process, command
        process.kill()
        process.communicate()


def test_a_run_killed_while_writing_leaves_the_old_files_and_the_next_clears_up(
    half_way, originals, prepared, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    process, command = half_way
    busy = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert busy.returncode == 2
    assert (
        busy.stderr == f"gsm8k.py: another run is writing to {out}; wait for its end, or choose another --local_dir\n"
    )
    process.kill()
    process.wait()
    assert files(out) == [".unfinished", "report.json", "test.parquet", "train.parquet"]
    assert [pq.read_metadata(out / f"{split}.parquet").num_rows for split in ("train", "test")] == [1, 1]
    (tmp_path / "originals" / "test.jsonl").unlink()
    # The killed run's whole train.parquet is not this one's to hand out.
    prepared("gsm8k", originals(test_DOT_jsonl=[question(6)] * 2), "--splits", "test")
    assert files(out) == ["report.json", "test.parquet", "train.parquet"]
    assert [pq.read_metadata(out / f"{split}.parquet").num_rows for split in ("train", "test")] == [1, 2]


def test_ctrl_c_leaves_the_old_files_and_nothing_else(half_way, tmp_path: Path) -> None:
    out = tmp_path / "out"
    process, _ = half_way
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=240)
    assert (process.returncode, said) == (130, "gsm8k.py: stopped; nothing was written\n")
    assert files(out) == ["report.json", "test.parquet", "train.parquet"]
    assert pq.read_metadata(out / "test.parquet").num_rows == 1


def test_an_error_in_the_last_split_leaves_the_old_files(originals, prepared, fails, tmp_path: Path) -> None:
    prepared("gsm8k", originals(train_DOT_jsonl=[question(1)], test_DOT_jsonl=[question(2)]))
    before = {name: (tmp_path / "out" / name).read_bytes() for name in files(tmp_path / "out")}
    folder = originals(train_DOT_jsonl=[question(3)], test_DOT_jsonl=[question(4), {"question": "?"}])
    assert fails("--source", str(folder)).startswith(f"{folder}/test.jsonl:2: no field 'answer'")
    assert {name: (tmp_path / "out" / name).read_bytes() for name in files(tmp_path / "out")} == before


def test_other_files_of_the_folder_are_let_be(originals, prepared, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("mine")
    prepared("gsm8k", originals(train_DOT_jsonl=[question(1)], test_DOT_jsonl=[question(2)]))
    assert files(tmp_path / "out") == ["notes.txt", "report.json", "test.parquet", "train.parquet"]


def test_user_errors_are_one_sentence(originals, fails, tmp_path: Path) -> None:
    folder = originals(train_DOT_jsonl=[{"question": "?", "answer": "none"}] * 3, test_DOT_jsonl=[question(1)])
    source = ["--source", str(folder)]
    assert fails("--source", str(tmp_path / "gone")).startswith(f"there is no folder {tmp_path}/gone; --source is")
    assert fails("--source", str(folder / "train.jsonl")).endswith("is the folder that holds the original files")
    assert fails(*source) == 'none of the 3 rows of train can be used; dropped 3: no final answer after "####"'
    assert fails(*source, "--limit", "0").endswith("0 is not a number of rows above 0")
    assert "--splits: invalid choice: 'dev'" in fails(*source, "--splits", "dev")
    assert "--hub: invalid choice: 'nowhere'" in fails("--hub", "nowhere")
    assert not (tmp_path / "out").exists() or files(tmp_path / "out") == []
    (tmp_path / "out").rmdir()
    (tmp_path / "out").write_text("a file")
    assert fails(*source) == f"--local_dir {tmp_path}/out cannot be a folder: a file is in its way; choose another"
    (folder / "train.jsonl").write_text("\n")
    (tmp_path / "out").unlink()
    assert fails(*source).startswith("there is not one row of train in the original")


def test_half_a_character_is_reported_with_its_line(originals, fails) -> None:
    # A pair of escapes of JSON that somebody has cut in two.
    for column in ("question", "answer"):
        row = {"question": "?", "answer": "#### 1", column: "\ud83d #### 1"}
        folder = originals(train_DOT_jsonl=[question(1), row])
        assert fails("--source", str(folder)).endswith(
            "train.jsonl:2: '\\ud83d' is half of a character, which no file can hold; mend the row"
        )


def test_a_full_disk_is_a_sentence(originals, fails, monkeypatch: pytest.MonkeyPatch) -> None:
    # The only way to fill a disk here without rights to mount one: a limit on what the process may write.
    import resource

    folder = originals(
        train_DOT_jsonl=[question(number, os.urandom(40).hex()) for number in range(9000)],
        test_DOT_jsonl=[question(1)],
    )
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # or a module imported meanwhile would be cut short, too
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    old = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        message = fails("--source", str(folder))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, old)
    assert "File too large" in message


def test_broken_columns_are_reported_without_a_traceback(originals, prepared) -> None:
    tasks = [{"task_id": 2**70, "text": "Add.", "test_list": ["assert True"]}]
    folder = originals(train_DOT_jsonl=[{**tasks[0], "task_id": 601, "code": None}, {**tasks[0], "task_id": 602}])
    assert len(prepared("mbpp", folder, "--splits", "train")["train"]) == 2
    bad = originals(train_DOT_json=[{"problem": "1?", "answer": "1", "solution": "", "difficulty": 10**400}])
    (bad / "train.jsonl").unlink()
    with pytest.raises(SystemExit, match=r"deepscaler\.py: one of the rows 0 to 1 of train does not fit the columns"):
        prepared("deepscaler", bad, "--splits", "train")


@pytest.mark.parametrize(
    "name",
    [
        "aime",
        "amc",
        "apps",
        "dapo_math",
        "deepscaler",
        "geo3k",
        "gsm8k",
        "gsm8k_tools",
        "math_dataset",
        "mbpp",
        "ultrafeedback",
    ],
)
def test_every_script_explains_itself(load_script: Callable[[str], ModuleType], name: str, capsys) -> None:
    with pytest.raises(SystemExit) as stopped:
        load_script(name).main(["--help"])
    assert stopped.value.code == 0
    text = capsys.readouterr().out
    assert f"python data_preprocess/{name}.py --local_dir" in " ".join(text.split())
    assert "--source" in text and "--hub_name" in text
