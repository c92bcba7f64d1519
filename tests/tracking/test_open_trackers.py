"""All trackers of a run as one."""

import json
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from dagrl.config.schema import TrackerSpec
from dagrl.scheduler.intervals import Activity
from dagrl.scheduler.plan import WorkerId
from dagrl.tracking import Timeline, Trackers, open_trackers
from dagrl.tracking.console import Console, Verbosity


def opened(run_dir, names=(), resumed_step=None, config=None, shown_samples=4):
    return open_trackers(
        [TrackerSpec.model_validate({"tracker": each} if isinstance(each, str) else each) for each in names],
        folder=run_dir.parent,
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
        trackers.timeline.extend([Activity("reward", "node", 0.0, 1.0, 1, 0, "host", WorkerId("host", 0))])
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


def test_no_tracker_gets_a_secret(tmp_path):
    with opened(tmp_path, ["tensorboard"], config={"judge": {"api_key": "xyzzy"}}):
        pass
    (text,) = EventAccumulator(str(tmp_path / "tensorboard")).Reload().Tensors("pipeline/text_summary")
    assert text.tensor_proto.string_val[0].decode() == "```yaml\njudge:\n  api_key: '***'\n```"


def test_a_users_tracker_gets_no_secrets(tmp_path):
    code = (
        "class Mine:\n"
        "    def __init__(self, api_key): self.key = api_key\n"
        "    def start(self, run_dir, config, resumed_step):\n"
        "        (run_dir / 'told').write_text(f'{self.key} {config}')\n"
        "    def log(self, step, metrics): pass\n"
        "    def close(self, ok): pass\n"
    )
    (tmp_path / "telling.py").write_text(code)
    asked = {"tracker": "telling:Mine", "args": {"api_key": "given words"}}
    command = ["run", "--api-key", "xyzzy words", "-H", "Cookie: xyzzy"]
    config = {"agent": {"env": {"A": "xyzzy words"}, "command": command}, "track": [asked]}
    (tmp_path / "run").mkdir()
    with opened(tmp_path / "run", [asked], config=config):
        pass
    key, _, told = (tmp_path / "run" / "told").read_text().partition(" words ")
    assert key == "given" and "xyzzy" not in told and "given" not in told


def test_no_note_has_a_secret(tmp_path, capsys):
    with opened(tmp_path, config={"name": "tiny", "agent": {"env": {"A": "xyzzy words"}}}) as trackers:
        trackers.note("mlflow: run 1 at https://me:xyzzy@mlflow.example; the agent said xyzzy words")
    assert capsys.readouterr().err == "mlflow: run 1 at https://me:***@mlflow.example; the agent said ***\n"


def test_notes_go_to_stderr_where_there_is_no_console(tmp_path, capsys):
    with opened(tmp_path) as trackers:
        trackers.note("two prompts dropped")
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "two prompts dropped\n")


def test_a_quiet_run_prints_warnings_alone(tmp_path, capsys):
    console = Console(3, verbosity=Verbosity.QUIET)
    trackers = Trackers([console], Timeline(), console, tmp_path, 0)
    trackers.note("one")
    trackers.warn("two")
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "two\n")


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


OWN = """
import json


class Lines:
    def __init__(self, name="lines", fails_at=None):
        self.name, self.fails_at = name, fails_at

    def start(self, run_dir, config, resumed_step):
        self.file = (run_dir / self.name).open("a")
        self.say("start", config["name"], config.get("api_key"), resumed_step)

    def log(self, step, metrics):
        if step == self.fails_at:
            raise KeyError("no such metric")
        self.say("log", step, metrics["reward/mean"])

    def close(self, ok):
        self.say("close", ok)

    def say(self, *what):
        self.file.write(json.dumps(what) + "\\n")
        self.file.flush()


class Shows(Lines):
    def samples(self, step, table):
        self.say("samples", step, len(table.rows))


class Breaks(Lines):
    def __init__(self):
        raise RuntimeError("no key")
"""


def said(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_a_users_tracker_gets_the_same_calls_as_others(tmp_path):
    (tmp_path / "own_trackers.py").write_text(OWN)
    run = tmp_path / "run"
    (run / "samples").mkdir(parents=True)
    pq.write_table(pa.Table.from_pylist([{"reward": 1.0}] * 3), run / "samples" / "step_1_val.parquet")
    named = {"tracker": "own_trackers:Shows", "args": {"name": "shown"}}
    with opened(run, ["own_trackers:Lines", named], config={"name": "tiny", "api_key": "sk-secret"}) as trackers:
        trackers.log(1, {"reward/mean": 0.5, "val/reward/mean": 0.25})
    common = [["start", "tiny", "***", None], ["log", 1, 0.5]]
    assert said(run / "lines") == [*common, ["close", True]]
    assert said(run / "shown") == [*common, ["samples", 1, 3], ["close", True]]


def test_a_users_tracker_that_fails_is_dropped_with_its_line(tmp_path, capsys):
    (tmp_path / "own_trackers.py").write_text(OWN)
    run = tmp_path / "run"
    with opened(run, ["console", {"tracker": "own_trackers:Lines", "args": {"fails_at": 2}}]) as trackers:
        for step in (1, 2, 3):
            trackers.log(step, {"reward/mean": 0.5})
    line = 1 + OWN.splitlines().index('            raise KeyError("no such metric")')
    told = f"own_trackers:Lines stopped: raised KeyError: 'no such metric' ({tmp_path / 'own_trackers.py'}:{line})"
    assert told in capsys.readouterr().out
    assert said(run / "lines") == [["start", "tiny", None, None], ["log", 1, 0.5], ["close", False]]
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 3


@pytest.mark.parametrize(
    ("tracker", "message"),
    [
        ("own_trackers:Breaks", "the tracker own_trackers:Breaks raised RuntimeError: no key"),
        ("own_trackers:Line", "did you mean `Lines`"),
        ("no_trackers:Lines", "there is no module 'no_trackers'"),
    ],
)
def test_a_users_tracker_that_cannot_be_made_is_reported_before_the_run(tmp_path, tracker, message):
    (tmp_path / "own_trackers.py").write_text(OWN)
    with pytest.raises(ValueError, match=message):
        opened(tmp_path / "run", [tracker])
