"""A folder that is not for a run is refused in one sentence, and nothing in it changes."""

from __future__ import annotations

import copy
import json
import os
import re
import resource
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from dagrl.backends.megatron.lora import LoraSpec
from dagrl.cli import main
from dagrl.config.loading.loader import load_pipeline
from dagrl.config.schema import Pipeline
from dagrl.orchestrator.folder.checkpoint import RunState
from dagrl.orchestrator.folder.identity import model_identity
from dagrl.orchestrator.folder.run_folder import RunFolder, open_run_folder
from dagrl.workers.errors import RefusedFolderError

Tree = dict[str, Any]


@pytest.fixture
def tree(lab) -> Tree:
    return lab.tiny_pipeline()


@contextmanager
def opened(path: Path, tree: Tree) -> Iterator[RunFolder]:
    with open_run_folder(path, Pipeline.model_validate(tree), tree) as folder:
        yield folder


def make_run(path: Path, tree: Tree, step: int = 4, *, saved: bool = True) -> Path:
    """A folder as a run leaves it, with a torn checkpoint and one that was cut off.

    Without checkpoints if not `saved`.
    """
    with opened(path, tree) as folder:
        if saved:
            state = RunState(step, model_identity(Pipeline.model_validate(tree)))
            folder.checkpoints.finish(folder.checkpoints.begin(step), state)
    if saved:
        (path / "checkpoints" / f"step_{step + 2}").mkdir()
        (path / "checkpoints" / f".step_{step + 3}.partial").mkdir()
    lines = [json.dumps({"step": number, "reward/mean": 0.5}) + "\n" for number in range(1, step + 1)]
    (path / "metrics.jsonl").write_text("".join(lines))
    (path / "samples").mkdir()
    (path / "samples" / "step_1.parquet").write_bytes(b"PAR1")
    return path


def snapshot(path: Path) -> dict[str, Any]:
    """All below a path: what each entry is, and what it holds."""
    found: dict[str, Any] = {}
    for each in [path, *sorted(path.rglob("*"))]:
        name = str(each.relative_to(path))
        if each.is_symlink():
            found[name] = str(each.readlink())
        elif each.is_file():
            found[name] = each.read_bytes()
        else:
            found[name] = oct(each.lstat().st_mode) if os.path.lexists(each) else None
    return found


def refused(path: Path, tree: Tree) -> str:
    """The sentence that refuses the folder."""
    before = snapshot(path)
    with pytest.raises(RefusedFolderError) as caught, opened(path, tree):
        pass
    assert snapshot(path) == before
    sentence = str(caught.value)
    assert "\n" not in sentence and sentence.count("; ") == 1
    return sentence


def set_in(tree: Tree, key: str, value: Any) -> Tree:
    """The tree with one key set, or taken away with None."""
    changed = copy.deepcopy(tree)
    *path, last = key.split(".")
    section = changed
    for each in path:
        section = section.setdefault(each, {})
    if value is None:
        del section[last]
    else:
        section[last] = value
    return changed


CRITIC = {"backend": "megatron", "group": "train", "head": "value"}
OTHER_RUNS = {
    "name": ("name", "other", "holds the run `tiny`, and this pipeline's name is `other`"),
    "model": ("model.init.hidden_size", 64, "another model"),
    "path": ("model", {"path": "/models/one"}, "another model"),
    "model of an engine": ("engines.actor.model", {"path": "/models/one"}, "another model"),
    "start weights": ("engines.actor.dist_checkpointing_path", "/weights", "another model"),
    "optimizer": ("engines.actor.optimizer.use_distributed_optimizer", False, "use_distributed_optimizer` than the"),
    "one more engine": ("nodes.critic", {"op": "critic", "engine": "reference"}, "`reference` by critic"),
    "another engine": ("nodes.update.engine", "reference", "trains `actor` by update, and this pipeline trains `ref"),
    "another objective": ("nodes.update", {"op": "sft", "engine": "actor"}, "this pipeline trains `actor` by sft"),
    "nothing that trains": ("nodes.update", None, "and this pipeline trains no engine"),
}


@pytest.mark.parametrize("saved", [True, False], ids=["with a checkpoint", "with metrics alone"])
def test_a_published_model_may_be_cached_elsewhere(tmp_path, tree, saved: bool) -> None:
    first, moved, newer, unnamed = (
        set_in(tree, "model", {"path": path} | ({"hub": hub} if hub else {}))
        for path, hub in [("/one/a", "me/m@a"), ("/two/a", "me/m@a"), ("/one/b", "me/m@b"), ("/two/a", "")]
    )
    path = make_run(tmp_path / "run", first, saved=saved)
    assert "another model" in refused(path, newer)
    assert "another model" in refused(path, unnamed)
    with opened(path, moved) as folder:
        assert bool(folder.resumed) == saved


OTHER_ADAPTERS: dict[str, tuple[Tree | None, Tree | None, str]] = {
    "rank": ({}, {"rank": 8}, "lora.rank"),
    "alpha": ({"alpha": 64}, {}, "lora.alpha"),
    "layers": ({}, {"target_modules": ["linear_qkv"]}, "lora.target_modules"),
    "none before": (None, {}, "lora"),
    "none now": ({}, None, "lora"),
}


@pytest.mark.parametrize("name", OTHER_ADAPTERS)
def test_adapters_that_mean_another_model_are_refused(tmp_path, tree, name: str) -> None:
    before, now, key = OTHER_ADAPTERS[name]
    first, second = (tree if lora is None else set_in(tree, "engines.actor.lora", lora) for lora in (before, now))
    path = make_run(tmp_path / "run", first)
    assert f"another `engines.actor.{key}` than the pipeline's" in refused(path, second)


def test_adapters_continue_with_what_may_change(tmp_path, tree) -> None:
    path = make_run(tmp_path / "run", set_in(tree, "engines.actor.lora", {}))
    defaults = LoraSpec()
    same = {"rank": defaults.rank, "alpha": defaults.alpha, "target_modules": defaults.target_modules}
    changed = same | {"dropout": 0.1, "merge": False, "init": "normal"}
    with opened(path, set_in(tree, "engines.actor.lora", changed)) as folder:
        assert folder.resumed and folder.resumed.step == 4


@pytest.mark.parametrize("saved", [True, False], ids=["with a checkpoint", "with metrics alone"])
@pytest.mark.parametrize("name", OTHER_RUNS)
def test_another_run_is_refused(tmp_path, tree, name: str, saved: bool) -> None:
    key, value, fragment = OTHER_RUNS[name]
    path = make_run(tmp_path / "run", tree, saved=saved)
    assert fragment in refused(path, set_in(tree, key, value))


SAME_RUN = {
    "more steps": ("run.steps", 99),
    "another learning rate": ("engines.actor.optimizer.lr", 1e-4),
    "another layout": ("groups.train.cpus_per_node", 2),
    "other data": ("data.train", "other.parquet"),
    "other samples": ("nodes.rollout.n", 8),
    "another reward": ("nodes.reward.fn", "exact"),
    "another loss": ("nodes.update.loss.kl_coef", 0.1),
    "a node less": ("nodes.ref", None),
    "trackers": ("track", ["tensorboard"]),
    "the optimizer's default": ("engines.actor.optimizer.use_distributed_optimizer", True),
}


@pytest.mark.parametrize("name", SAME_RUN)
def test_a_run_continues_with_what_may_change(tmp_path, tree, name: str) -> None:
    key, value = SAME_RUN[name]
    path = make_run(tmp_path / "run", tree)
    with opened(path, set_in(tree, key, value)) as folder:
        assert folder.resumed and folder.resumed.step == 4
        assert folder.changed.startswith(key)


def test_a_run_that_has_recorded_nothing_may_change_its_model(tmp_path, tree) -> None:
    with opened(tmp_path / "run", tree):
        pass
    with opened(tmp_path / "run", set_in(tree, "model.init.hidden_size", 64)) as folder:
        assert folder.resumed is None
    assert "holds the run `tiny`" in refused(tmp_path / "run", set_in(tree, "name", "other"))


@pytest.mark.parametrize("change", ["none", "lr", "fewer steps", "model of another seed"])
def test_a_finished_run_does_not_change(tmp_path, tree, change: str) -> None:
    tree["run"]["steps"] = 4
    path = make_run(tmp_path / "run", tree)
    before = snapshot(path)
    key, value = {
        "none": ("name", "tiny"),
        "lr": ("engines.actor.optimizer.lr", 0.5),
        "fewer steps": ("run.steps", 2),
        "model of another seed": ("run.save_every", 1),
    }[change]
    with opened(path, set_in(tree, key, value)) as folder:
        assert folder.resumed and folder.resumed.step == 4
        assert folder.changed.startswith("" if change == "none" else key)
    assert snapshot(path) == before


def test_a_copy_without_hidden_files_continues(tmp_path, tree) -> None:
    path = make_run(tmp_path / "run", tree)
    (path / ".lock").unlink()
    with opened(path, tree) as folder:
        assert folder.resumed and folder.resumed.step == 4


@pytest.mark.parametrize("entries", [[], [".lock"], ["logs/"], ["lost+found/"], ["logs/", ".lock", ".gitkeep"]])
def test_a_folder_without_a_run_is_taken_if_nothing_in_it_can_be_lost(tmp_path, tree, entries: list[str]) -> None:
    for name in entries:
        (tmp_path / name).mkdir() if name.endswith("/") else (tmp_path / name).touch()
    with opened(tmp_path, tree) as folder:
        assert folder.resumed is None
    assert (tmp_path / "pipeline.yaml").is_file()


def write(text: str | bytes) -> Callable[[Path], None]:
    return lambda path: path.write_bytes(text.encode() if isinstance(text, str) else text) and None


def link(target: str) -> Callable[[Path], None]:
    return lambda path: path.symlink_to(target)


def bind(path: Path) -> None:
    """A socket at a path of any length."""
    working = Path.cwd()
    os.chdir(path.parent)
    try:
        with socket.socket(socket.AF_UNIX) as end:
            end.bind(path.name)
    finally:
        os.chdir(working)


FOREIGN: dict[str, tuple[str, Callable[[Path], Any], str]] = {
    "metrics of another program": ("metrics.jsonl", write('{"loss": 1}\n'), "no run has written metrics.jsonl"),
    "notes": ("notes.txt", write("text"), "no run has written notes.txt"),
    "a user's own pipeline": ("pipeline.yaml", write("name: tiny\n"), "no run has written pipeline.yaml"),
    "a hidden file": (".bashrc", write("export A=1\n"), "no run has written .bashrc"),
    "a repository": (".git", Path.mkdir, "no run has written .git"),
    "a link to nowhere": ("data", link("/nowhere"), "no run has written data"),
    "a name with a line break": ("a\nb", write("text"), "no run has written"),
    "samples": ("samples", Path.mkdir, "no run has written samples"),
    "checkpoints": ("checkpoints", Path.mkdir, "no run has written checkpoints"),
    "a pipe": ("pipe", os.mkfifo, "no run has written pipe"),
    "a lock that is a pipe": (".lock", os.mkfifo, ".lock is not a regular file"),
    "a lock that is a folder": (".lock", Path.mkdir, ".lock is not a regular file"),
    "a lock that is a link to nowhere": (".lock", link("gone/lock"), ".lock is not a regular file"),
    "logs that are a file": ("logs", write("text"), "logs is not a folder"),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_a_folder_of_something_else_is_refused(tmp_path, tree, name: str) -> None:
    entry, make, fragment = FOREIGN[name]
    make(tmp_path / entry)
    assert fragment in refused(tmp_path, tree)


def test_a_long_list_of_foreign_entries_is_cut(tmp_path, tree) -> None:
    for number in range(50):
        (tmp_path / f"file_{number:02}").touch()
    assert "no run has written file_00, file_01, file_02, ...; give" in refused(tmp_path, tree)


BROKEN: dict[str, tuple[str, Callable[[Path], Any], str]] = {
    "checkpoints": ("checkpoints", write(""), "checkpoints is not a folder"),
    "checkpoints in a pipe": ("checkpoints", os.mkfifo, "checkpoints is not a folder"),
    "checkpoints nowhere": ("checkpoints", link("/nowhere"), "checkpoints is not a folder"),
    "checkpoints in a loop": ("checkpoints", link("checkpoints"), "checkpoints is not a folder"),
    "samples": ("samples", write(""), "samples is not a folder"),
    "logs": ("logs", bind, "logs is not a folder"),
    "tensorboard": ("tensorboard", write(""), "tensorboard is not a folder"),
    "metrics": ("metrics.jsonl", Path.mkdir, "metrics.jsonl is not a regular file"),
    "metrics in a pipe": ("metrics.jsonl", os.mkfifo, "metrics.jsonl is not a regular file"),
    "metrics on a full disk": ("metrics.jsonl", link("/dev/full"), "metrics.jsonl is not a regular file"),
    "metrics nowhere": ("metrics.jsonl", link("/nowhere/metrics"), "metrics.jsonl is not a regular file"),
    "metrics of another program": (
        "metrics.jsonl",
        write('{"loss": 1}\n' * 2),
        "metrics.jsonl:1: not a step's metrics",
    ),
    "metrics that are a list": ("metrics.jsonl", write("[1]\n[2]\n"), "metrics.jsonl:1: not a step's metrics"),
    "metrics that are bytes": ("metrics.jsonl", write(b"\xff\n\x00\n"), "metrics.jsonl:1: not a step's metrics"),
    "the timeline": ("timeline.json", Path.mkdir, "timeline.json is not a regular file"),
    "the timeline in a pipe": ("timeline.json", os.mkfifo, "timeline.json is not a regular file"),
    "the workers": ("workers.json", Path.mkdir, "workers.json is not a regular file"),
    "the lock": (".lock", Path.mkdir, ".lock is not a regular file"),
    "the lock in a pipe": (".lock", os.mkfifo, ".lock is not a regular file"),
    "the best": ("checkpoints/best", Path.mkdir, "checkpoints/best is not a regular file"),
    "a file aside": ("pipeline.yaml.new", Path.mkdir, "pipeline.yaml.new is not a regular file"),
    "metrics aside": ("metrics.jsonl.new", os.mkfifo, "metrics.jsonl.new is not a regular file"),
    "a pipeline that is a folder": ("pipeline.yaml", Path.mkdir, "pipeline.yaml is not a regular file"),
    "a pipeline in a pipe": ("pipeline.yaml", os.mkfifo, "pipeline.yaml is not a regular file"),
    "an empty pipeline": ("pipeline.yaml", write(""), "does not tell which run the folder holds: is empty"),
    "a torn pipeline": ("pipeline.yaml", write("name: tiny\nmodel: {init"), "does not tell which run"),
    "a pipeline that is a list": ("pipeline.yaml", write("[a]"), "does not tell which run the folder holds: holds a"),
    "a pipeline of bytes": ("pipeline.yaml", write(b"\xff\xfe\x00"), "is not text in UTF-8"),
    "a pipeline of NUL": ("pipeline.yaml", write(b"\0" * 100), "contains the character #x00"),
    "a pipeline without a name": ("pipeline.yaml", write("run: {steps: 3}\n"), "has no `name`"),
    "a pipeline that is a bomb": (
        "pipeline.yaml",
        write("a0: &a0 [1]\n" + "".join(f"a{n}: &a{n} [{f'*a{n - 1},' * 9}]\n" for n in range(1, 10))),
        "a pipeline may hold 10,000 values",
    ),
    "a pipeline that was cut": ("pipeline.yaml", write("name: tiny\n"), "holds a run that trains no engine"),
    "a state in a pipe": ("checkpoints/step_4/state.json", os.mkfifo, "step_4 is torn: state.json cannot be read"),
    "a state that is a folder": ("checkpoints/step_4/state.json", Path.mkdir, "step_4 is torn"),
    "a state of bytes": ("checkpoints/step_4/state.json", write(b"\xff"), "step_4 is torn"),
    "a state of another version": (
        "checkpoints/step_4/state.json",
        write('{"format": 99, "dagrl": "7.0"}'),
        "was written by dagrl 7.0 in format 99",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_run_with_a_broken_part_is_refused(tmp_path, tree, name: str) -> None:
    entry, make, fragment = BROKEN[name]
    tree["track"] = ["console", "tensorboard"]
    path = make_run(tmp_path / "run", tree)
    there = path / entry
    if there.is_dir():
        shutil.rmtree(there)
    there.unlink(missing_ok=True)
    make(there)
    assert fragment in refused(path, tree)


PATHS: dict[str, tuple[Callable[[Path], Path], str]] = {
    "a file": (lambda folder: folder / "train.parquet", "train.parquet is not a folder"),
    "below a file": (lambda folder: folder / "train.parquet" / "run", "cannot be used: Not a directory"),
    "a pipe": (lambda folder: folder / "pipe", "pipe is not a folder"),
    "a device": (lambda _: Path("/dev/null"), "/dev/null is not a folder"),
    "a link to a file": (lambda folder: folder / "to_file", "to_file is not a folder"),
    "a link to nowhere": (lambda folder: folder / "to_nowhere", "is a link to a folder that does not exist"),
    "links that loop": (lambda folder: folder / "loop", "cannot be used: Too many levels of symbolic links"),
    "below links that loop": (lambda folder: folder / "loop" / "run", "Too many levels of symbolic links"),
    "a long name": (lambda folder: folder / ("a" * 300), "cannot be used: File name too long"),
    "a long path": (lambda folder: folder / "/".join(["a"] * 3000), "cannot be used: File name too long"),
    "the folder of runs": (lambda folder: folder, "is not empty, and no run has written"),
    "within a run": (lambda folder: folder / "run" / "again", "which holds a run; choose a folder beside it"),
    "a run's checkpoints": (lambda folder: folder / "run" / "checkpoints", "which holds a run"),
    "a checkpoint's name": (lambda folder: folder / "run" / "checkpoints" / "step_99", "which holds a run"),
    "the kernel's": (lambda _: Path("/proc/self/run"), "cannot write to the run folder /proc/self/run"),
}


@pytest.mark.parametrize("name", PATHS)
def test_a_path_that_cannot_be_a_run_folder_is_refused(tmp_path, tree, name: str) -> None:
    make_run(tmp_path / "run", tree)
    (tmp_path / "train.parquet").write_bytes(b"PAR1")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "to_file").symlink_to("train.parquet")
    (tmp_path / "to_nowhere").symlink_to("/nowhere")
    (tmp_path / "loop").symlink_to("loop")
    make, fragment = PATHS[name]
    before = snapshot(tmp_path)
    with pytest.raises(RefusedFolderError) as caught, opened(make(tmp_path), tree):
        pass
    assert fragment in str(caught.value)
    assert snapshot(tmp_path) == before


@pytest.fixture
def as_nobody() -> Iterator[Callable[[], None]]:
    """Gives up root's right to write everywhere, until the end of the test."""
    before = os.geteuid()
    yield lambda: os.seteuid(65534) if before == 0 else None
    os.seteuid(before)


@pytest.mark.parametrize("name", ["run", "new"])
def test_a_folder_that_may_not_be_written_to_is_refused(tree, as_nobody, name: str) -> None:
    with tempfile.TemporaryDirectory() as parent:
        path = make_run(Path(parent) / "run", tree)
        for each in (Path(parent), path):
            each.chmod(0o555)
        before = snapshot(Path(parent))
        as_nobody()
        told = "may not be written to" if name == "run" else "cannot write to the run folder .*: Permission denied"
        with pytest.raises(RefusedFolderError, match=told), opened(Path(parent) / name, tree):
            pass
        os.seteuid(os.getuid())
        assert snapshot(Path(parent)) == before
        Path(parent).chmod(0o755)


@contextmanager
def full_disk() -> Iterator[None]:
    """No file of this process may grow."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_run_on_a_full_disk_is_refused(tmp_path, tree) -> None:
    path = make_run(tmp_path / "run", tree)
    before = snapshot(path)
    with full_disk(), pytest.raises(RefusedFolderError) as caught, opened(path, set_in(tree, "run.steps", 99)):
        pass
    assert f"cannot write to the run folder {path}: File too large; make room" in str(caught.value)
    assert snapshot(path) == before


class TestCommand:
    @pytest.fixture
    def file(self, lab, tmp_path, tree) -> Path:
        tree["run"]["steps"] = 4
        tree["track"] = []
        return lab.write_pipeline(tmp_path, tree)

    @pytest.fixture
    def finished(self, file, tmp_path) -> Path:
        """A folder as the run of `file` leaves it."""
        loaded = load_pipeline(file)
        path = tmp_path / "runs" / "tiny"
        with open_run_folder(path, loaded.pipeline, loaded.resolved) as folder:
            state = RunState(4, model_identity(loaded.pipeline))
            folder.checkpoints.finish(folder.checkpoints.begin(4), state)
        (path / "metrics.jsonl").write_text("".join(f'{{"step": {step}}}\n' for step in range(1, 5)))
        return path

    @pytest.mark.parametrize("override", ["engines.actor.optimizer.lr=0.5", "run.steps=2", "nodes.rollout.n=8"])
    def test_a_finished_run_is_not_changed_by_another_call(
        self, file, finished, override, monkeypatch, capsys, tmp_path
    ) -> None:
        monkeypatch.chdir(tmp_path)
        before = snapshot(finished)
        assert main(["run", str(file), override]) == 0
        out = capsys.readouterr().out
        assert "finished step 4 before; nothing is left to do" in out
        assert f"without effect, and not noted in the folder: {override.partition('=')[0]}" in out
        assert snapshot(finished) == before
        assert main(["report", str(finished)]) == 0
        assert "4 of 4 steps" in capsys.readouterr().out

    @pytest.mark.parametrize(
        ("arguments", "fragment"),
        [
            (["name=other"], "runs/tiny holds the run `tiny`, and this pipeline's name is `other`"),
            (["model.init.hidden_size=64"], "holds another model than the pipeline's"),
            (["--run-dir", "train.parquet"], "train.parquet is not a folder"),
            (["--run-dir", "."], ". is not empty, and no run has written "),
            (["--run-dir=~/run"], "home/run is not empty, and no run has written notes"),
        ],
    )
    def test_a_folder_that_is_refused_exits_with_2(
        self, file, finished, arguments, fragment, monkeypatch, capsys, tmp_path
    ) -> None:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("HOME", str(tmp_path / "home"))
        (tmp_path / "home" / "run" / "notes").mkdir(parents=True)
        if not any("run-dir" in each for each in arguments):
            arguments = [*arguments, "--run-dir", "runs/tiny"]
        before = snapshot(tmp_path)
        assert main(["run", str(file), *arguments]) == 2
        told = capsys.readouterr()
        (line,) = [each for each in told.err.splitlines() if "warning" not in each]
        assert line.startswith("dagrl run: ") and fragment in line and "; " in line
        assert re.fullmatch(r"starting \w+, 4 steps\n", told.out)
        after = snapshot(tmp_path)
        assert {name: after[name] for name in before} == before
        assert all("__pycache__" in name for name in after.keys() - before.keys())

    def test_on_several_machines_it_is_refused_before_they_meet(self, file, monkeypatch, capsys, tmp_path) -> None:
        job = {
            "NNODES": "2",
            "NODE_RANK": "0",
            "NPROC_PER_NODE": "2",
            "MASTER_ADDR": "10.9.8.7",
            "MASTER_PORT": "29599",
        }
        for name, value in job.items():
            monkeypatch.setenv(f"PET_{name}", value)
        monkeypatch.setattr("dagrl.launcher.rendezvous._FAREWELL_S", 0.1)
        before = snapshot(tmp_path)
        assert main(["launch", str(file), "--run-dir", str(tmp_path)]) == 2
        assert f"dagrl launch: {tmp_path} is not empty, and no run has written" in capsys.readouterr().err
        after = snapshot(tmp_path)
        assert {name: after[name] for name in before} == before

    def test_an_empty_name_of_a_folder_is_refused(self, file, capsys) -> None:
        assert main(["run", str(file), "--run-dir", ""]) == 2
        assert "invalid value for '--run-dir': expected a path, got an empty text" in capsys.readouterr().err
