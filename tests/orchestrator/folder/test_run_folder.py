"""The run folder: one writer at a time, and nothing lost by a mistake."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from dagrl.config.loading.loader import modules_of
from dagrl.config.schema import Pipeline
from dagrl.orchestrator.folder.checkpoint import RunState
from dagrl.orchestrator.folder.identity import model_identity
from dagrl.orchestrator.folder.run_folder import open_run_folder
from dagrl.workers.errors import RefusedFolderError, RunError

HOLDER = """
import sys
from pathlib import Path
from dagrl.config.loading.loader import modules_of
from dagrl.orchestrator.folder.run_folder import open_run_folder
from dagrl.config.schema import Pipeline

with open_run_folder(Path(sys.argv[1]), Pipeline.model_validate_json(sys.argv[2]), {"name": "tiny", "by": "holder"}):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def pipeline(lab) -> Pipeline:
    return Pipeline.model_validate(lab.tiny_pipeline())


@pytest.fixture
def holder(tmp_path: Path, pipeline: Pipeline) -> Iterator[subprocess.Popen]:
    """Another process that writes to ``run``, after this one has."""
    with open_run_folder(tmp_path / "run", pipeline, resolved("before")):
        pass
    command = [sys.executable, "-c", HOLDER, str(tmp_path / "run"), pipeline.model_dump_json()]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def edited(pipeline: Pipeline, **sections: dict) -> Pipeline:
    """The pipeline with some keys changed."""
    declared = pipeline.model_dump(mode="json")
    for section, values in sections.items():
        declared[section].update(values)
    return Pipeline.model_validate(declared)


def save_checkpoint(folder: Path, pipeline: Pipeline, step: int = 4) -> Path:
    """A checkpoint as a run of `pipeline` leaves it."""
    with open_run_folder(folder, pipeline, resolved("first")) as run:
        aside = run.checkpoints.begin(step)
        return run.checkpoints.finish(aside, RunState(step, model_identity(pipeline)))


def resolved(by: str) -> dict[str, str]:
    """A resolved pipeline, with a key that tells it from others of the same name."""
    return {"name": "tiny", "by": by}


def written(folder: Path) -> str:
    """The `by` of the pipeline that the folder was last used with."""
    return yaml.safe_load((folder / "pipeline.yaml").read_text())["by"]


def refusal(folder: Path, pipeline: Pipeline) -> RefusedFolderError:
    """Why the folder cannot be opened."""
    with pytest.raises(RefusedFolderError) as caught, open_run_folder(folder, pipeline, resolved("second")):
        pass
    return caught.value


def test_a_new_folder_is_made_with_the_resolved_pipeline(tmp_path, pipeline) -> None:
    path = tmp_path / "deep" / "run"
    with open_run_folder(path, pipeline, resolved("tiny")) as folder:
        assert (folder.path, folder.resumed, folder.resumed_from) == (path, None, None)
        assert written(path) == "tiny"
        assert {each.name for each in path.iterdir()} == {".lock", "pipeline.yaml"}


def test_it_is_known_where_the_users_own_modules_were(tmp_path, pipeline, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "run"
    assert modules_of(path) == path
    with open_run_folder(path, pipeline, resolved("tiny"), modules=Path("code")):
        assert modules_of(path) == tmp_path / "code"


def test_a_folder_with_a_checkpoint_is_gone_on_with(tmp_path, pipeline) -> None:
    saved = save_checkpoint(tmp_path, pipeline)
    with open_run_folder(tmp_path, edited(pipeline, run={"steps": 99}), resolved("longer")) as folder:
        assert folder.resumed == RunState(4, model_identity(pipeline))
        assert folder.resumed_from == saved
    assert written(tmp_path) == "longer"


def test_changes_since_the_start_of_the_run_are_reported_once(tmp_path, pipeline) -> None:
    save_checkpoint(tmp_path, pipeline)
    with open_run_folder(tmp_path, pipeline, resolved("second")) as folder:
        assert folder.changed == "by first -> second"
    with open_run_folder(tmp_path, pipeline, resolved("second")) as folder:
        assert folder.changed == ""
    (tmp_path / "pipeline.yaml").unlink()
    with open_run_folder(tmp_path, pipeline, resolved("third")) as folder:
        assert folder.changed == ""


def test_the_start_weights_of_a_critic_are_part_of_a_checkpoints_model(tmp_path, pipeline) -> None:
    critic = {"backend": "megatron", "group": "train", "head": "value"}
    init = {"model_type": "qwen3", "hidden_size": 16}
    with_own = edited(pipeline, engines={"critic": critic | {"model": {"init": init}}})
    other = edited(pipeline, engines={"critic": critic | {"model": {"init": init | {"hidden_size": 32}}}})
    save_checkpoint(tmp_path, with_own)
    assert "holds another model than the pipeline's" in refusal(tmp_path, other).cause
    # One that begins as the policy does, and a judge, which is never saved, are nothing to compare.
    judge = {"backend": "hf", "group": "rollout", "head": "reward", "model": {"init": init}}
    plain = model_identity(edited(pipeline, engines={"critic": critic, "judge": judge}))
    assert plain == model_identity(pipeline)


def test_a_folder_that_another_process_writes_to_is_refused_with_its_pid(tmp_path, pipeline, holder) -> None:
    error = refusal(tmp_path / "run", pipeline)
    assert error.cause == f"another run (pid {holder.pid}) is writing to {tmp_path / 'run'}"
    assert "--run-dir" in error.hint
    assert written(tmp_path / "run") == "holder"


def test_a_run_restarts_after_a_failure_even_with_resume_never(tmp_path, pipeline) -> None:
    never = edited(pipeline, run={"resume": "never"})
    saved = save_checkpoint(tmp_path, never)
    with open_run_folder(tmp_path, never, resolved("again"), again=True) as folder:
        assert folder.resumed_from == saved


def test_a_folder_is_free_again_when_its_writer_is_killed(tmp_path, pipeline, holder) -> None:
    holder.kill()
    holder.wait()
    with open_run_folder(tmp_path / "run", pipeline, resolved("next")):
        assert written(tmp_path / "run") == "next"


def test_a_folder_is_free_again_after_a_failure(tmp_path, pipeline) -> None:
    with pytest.raises(KeyError), open_run_folder(tmp_path, pipeline, resolved("failing")):
        raise KeyError("in the middle of the run")
    with open_run_folder(tmp_path, pipeline, resolved("next")):
        pass


def test_resume_never_refuses_a_checkpoint_and_takes_a_folder_without(tmp_path, pipeline) -> None:
    never = edited(pipeline, run={"resume": "never"})
    with open_run_folder(tmp_path, never, resolved("new")) as folder:
        assert folder.resumed is None
    save_checkpoint(tmp_path, pipeline)
    error = refusal(tmp_path, never)
    assert error.cause == f"{tmp_path} holds a checkpoint of step 4 and the pipeline says resume: never"
    assert written(tmp_path) == "first", "a refused run must not touch the folder"


SHAPE = {"model_type": "qwen3", "hidden_size": 32}


@pytest.mark.parametrize(
    ("saved_model", "model"),
    [
        ({"init": SHAPE}, {"init": {**SHAPE, "hidden_size": 48}}),
        ({"init": SHAPE}, {"init": None, "path": "/models/one"}),
        ({"init": None, "path": "/models/one"}, {"init": None, "path": "/models/other"}),
    ],
)
def test_another_models_checkpoint_is_refused(tmp_path, pipeline, saved_model: dict, model: dict) -> None:
    saved = save_checkpoint(tmp_path, edited(pipeline, model=saved_model))
    error = refusal(tmp_path, edited(pipeline, model=model))
    assert error.cause == f"{saved} holds another model than the pipeline's"
    assert written(tmp_path) == "first"


def test_a_checkpoint_of_another_format_is_refused(tmp_path, pipeline) -> None:
    saved = save_checkpoint(tmp_path, pipeline)
    (saved / "state.json").write_text(json.dumps({"format": 99, "dagrl": "7.0"}))
    error = refusal(tmp_path, pipeline)
    assert "written by dagrl 7.0 in format 99" in error.cause
    assert "--run-dir" in error.hint


def test_a_save_that_fails_leaves_nothing(tmp_path: Path, pipeline: Pipeline) -> None:
    whole = save_checkpoint(tmp_path / "run", pipeline)
    with pytest.raises(OSError, match="full"), open_run_folder(tmp_path / "run", pipeline, resolved("second")) as run:
        (run.checkpoints.begin(5) / "half").touch()
        raise OSError("the disk is full")
    assert list((tmp_path / "run" / "checkpoints").iterdir()) == [whole]


def test_a_torn_checkpoint_is_reported_and_renamed(tmp_path, pipeline) -> None:
    whole, torn = (save_checkpoint(tmp_path, pipeline, step) for step in (4, 6))
    (torn / "state.json").write_text("{}")
    with open_run_folder(tmp_path, pipeline, resolved("again")) as folder:
        assert folder.resumed_from == whole
        assert [line.partition(": ")[0] for line in folder.torn] == [f"the checkpoint {torn} is torn"]
        assert folder.torn[0].endswith("it is now step_6.torn")
    assert {each.name for each in torn.parent.iterdir()} == {"step_4", "step_6.torn"}


def test_no_run_starts_over_if_every_checkpoint_is_torn(tmp_path, pipeline) -> None:
    torn = save_checkpoint(tmp_path, pipeline)
    (torn / "state.json").write_bytes(b"\xff\xfe")
    refused = refusal(tmp_path, pipeline)
    assert f"the checkpoint {torn} is torn: state.json cannot be read" in refused.cause
    assert "a new --run-dir" in refused.hint
    assert torn.is_dir()


def test_a_validation_alone_leaves_the_folder_of_a_run_unchanged(tmp_path, pipeline) -> None:
    run = tmp_path / "run"
    save_checkpoint(run, pipeline, 2)
    newest = save_checkpoint(run, pipeline, 4)
    torn, partial = run / "checkpoints" / "step_6", run / "checkpoints" / ".step_7.partial"
    torn.mkdir()
    partial.mkdir()
    before = set(run.rglob("*"))
    for wanted, step in ((True, 4), (2, 2), (4, 4)):
        # `never` is about training.
        alone = edited(pipeline, run={"val_only": wanted, "steps": 3, "resume": "never"})
        with open_run_folder(run, alone, resolved("alone")) as folder:
            assert folder.resumed is not None and folder.resumed.step == step
            assert folder.changed == ""
            assert bool(folder.torn) == (wanted is True)
    assert folder.resumed_from == newest
    assert written(run) == "first"
    assert set(run.rglob("*")) == before
    alone = edited(pipeline, run={"val_only": True})
    with open_run_folder(tmp_path / "new", alone, resolved("new")) as folder:
        assert folder.resumed is None
    assert written(tmp_path / "new") == "new"


@pytest.mark.parametrize(
    ("run", "hint"),
    [
        ({"val_only": 3}, "there are 2, 4; name one"),
        ({"val_only": 1}, "there are 2, 4; name one"),
        ({"val_only": "best"}, "name a step"),
        ({"val_only": "best", "keep_best": {}}, "name a step"),
        ({"val_only": 4}, "name another step"),
    ],
)
def test_a_checkpoint_to_validate_that_is_not_there_is_named(tmp_path, pipeline, run, hint) -> None:
    for step in (2, 4):
        saved = save_checkpoint(tmp_path, pipeline, step)
    (saved / "state.json").write_text("{")
    assert hint in refusal(tmp_path, edited(pipeline, run=run)).hint


def test_files_with_secrets_are_the_owner_s_alone_and_resume_keeps_the_values(tmp_path: Path, pipeline) -> None:
    config = {"name": "tiny", "agent": {"env": {"A": "xyzzy words"}}}
    file = tmp_path / "run" / "pipeline.yaml"
    with open_run_folder(tmp_path / "run", pipeline, config):
        pass
    file.chmod(0o644)  # as an earlier version has left it
    with open_run_folder(tmp_path / "run", pipeline, config) as run:
        error = RunError("the agent said xyzzy words", hint="PGPASSWORD=xyzzy", details="Traceback: xyzzy words")
        run.keep_details(error)
    assert yaml.safe_load(file.read_text()) == config
    log = tmp_path / "run" / "logs" / "failure.txt"
    assert [path.stat().st_mode & 0o777 for path in (file, log)] == [0o600, 0o600]
    assert log.read_text() == "Traceback: ***"
    assert "xyzzy" not in "\n".join(error.lines())


def test_a_new_folder_is_the_owner_s_alone_and_one_that_is_there_keeps_its_mode(tmp_path: Path, pipeline) -> None:
    new, shared = tmp_path / "runs" / "new", tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o2770)
    for folder in (new, new, shared):
        with open_run_folder(folder, pipeline, {"name": "tiny"}):
            pass
    assert [path.stat().st_mode & 0o7777 for path in (new, shared)] == [0o700, 0o2770]
    new.chmod(0o750)
    with open_run_folder(new, pipeline, {"name": "tiny"}):
        pass
    assert new.stat().st_mode & 0o7777 == 0o750
