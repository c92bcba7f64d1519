"""All trackers of a run as one."""

import json
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from dagrl.tracking import open_trackers


def opened(run_dir, names=(), resumed_step=None, config=None, shown_samples=4):
    return open_trackers(
        names,
        run_dir=run_dir,
        run_name="tiny",
        config=config or {"name": "tiny"},
        total_steps=3,
        resumed_step=resumed_step,
        shown_samples=shown_samples,
    )


def tensors(run_dir, tag):
    return [event.step for event in EventAccumulator(str(run_dir / "tensorboard")).Reload().Tensors(tag)]


def test_files_are_kept_even_if_nothing_is_asked_for(tmp_path):
    with opened(tmp_path) as trackers:
        trackers.log(1, {"reward/mean": 0.5})
        trackers.timeline.complete("reward", "node", 0.0, 1.0, step=1, shard=0, group="host", worker="host/0")
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {"step": 1, "reward/mean": 0.5}
    assert len(json.loads((tmp_path / "timeline.json").read_text())) == 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.jsonl", "timeline.json"]


def test_all_that_is_asked_for_gets_the_metrics(tmp_path, capsys):
    with opened(tmp_path, ["console", "tensorboard"]) as trackers:
        trackers.log(1, {"reward/mean": 0.5})
    assert "step 1/3  reward 0.500" in capsys.readouterr().out
    assert len(list((tmp_path / "tensorboard").iterdir())) == 1


def test_samples_of_validations_are_shown(tmp_path):
    (tmp_path / "samples").mkdir()
    rows = [{"data_set": "val", "prompt": "1+1=", "response": "2", "reward": 1.0}]
    for name in ("step_0_val", "step_1", "step_2_val"):
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / "samples" / f"{name}.parquet")
    with opened(tmp_path, ["tensorboard"]) as trackers:
        trackers.log(0, {"val/reward/mean": 0.1})
        trackers.log(1, {"reward/mean": 0.5})
        trackers.log(2, {"reward/mean": 0.5, "val/reward/mean": 0.5})
        trackers.log(3, {"val/reward/mean": 0.5})
    assert tensors(tmp_path, "val/samples/text_summary") == [0, 2]


def test_samples_that_cannot_be_read_are_a_note(tmp_path, capsys):
    (tmp_path / "samples").mkdir()
    (tmp_path / "samples" / "step_1_val.parquet").write_bytes(b"half of it")
    with opened(tmp_path, ["tensorboard"]) as trackers:
        trackers.log(1, {"val/reward/mean": 0.5})
    assert capsys.readouterr().err.startswith("the samples of step 1 cannot be shown: ")


def test_no_tracker_is_told_a_secret(tmp_path):
    with opened(tmp_path, ["tensorboard"], config={"judge": {"api_key": "xyzzy"}}):
        pass
    (text,) = EventAccumulator(str(tmp_path / "tensorboard")).Reload().Tensors("pipeline/text_summary")
    assert text.tensor_proto.string_val[0].decode() == "```yaml\njudge:\n  api_key: '***'\n```"


def test_notes_go_to_stderr_where_there_is_no_console(tmp_path, capsys):
    with opened(tmp_path) as trackers:
        trackers.note("two prompts dropped")
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "two prompts dropped\n")


def test_an_error_of_the_run_is_not_hidden_by_one_of_closing(tmp_path, capsys):
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    with pytest.raises(OSError, match="cannot write") as caught, opened(tmp_path) as trackers:
        trackers.log(1, {"reward/mean": 0.5})
    assert caught.traceback[-1].name == "naming"
    assert "log" in [entry.name for entry in caught.traceback]
    assert "metrics.jsonl" in capsys.readouterr().err


def test_a_file_that_cannot_be_opened_closes_the_others(tmp_path):
    (tmp_path / "tensorboard").write_text("in the way")
    with pytest.raises(OSError, match="tensorboard"):
        opened(tmp_path, ["tensorboard"])
    with opened(tmp_path) as trackers:
        trackers.log(1, {})


def test_importing_trackers_is_light():
    program = (
        "import dagrl.tracking, sys; heavy = 'torch ray wandb tensorboard mlflow swanlab pyarrow'.split();"
        "print([m for m in heavy if m in sys.modules])"
    )
    assert subprocess.check_output([sys.executable, "-c", program], text=True).strip() == "[]"
