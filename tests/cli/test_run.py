from pathlib import Path

import pytest

from dagrl.cli import main
from dagrl.orchestrator.outcome import RunOutcome
from dagrl.tracking.console import Verbosity


@pytest.fixture
def runs(monkeypatch) -> list[tuple]:
    """The calls of `run_pipeline`, which runs nothing."""
    calls: list[tuple] = []

    def run_pipeline(*arguments: object) -> RunOutcome:
        calls.append(arguments)
        return RunOutcome(10, stopped=False)

    monkeypatch.setattr("dagrl.orchestrator.run.run_pipeline", run_pipeline)
    return calls


def test_a_run_begins_with_what_the_check_warns_of(pipeline, capsys, runs):
    assert main(["run", str(pipeline), "nodes.ref={op: logprob, engine: actor, write: ref_logprob}"]) == 0
    (warning,) = capsys.readouterr().err.splitlines()
    assert warning.startswith("dagrl run: warning: ") and "nodes.ref.engine" in warning


@pytest.mark.parametrize(
    ("options", "verbosity", "begins"),
    [([], Verbosity.NORMAL, "starting tiny, 10 steps\nfinished step 10"), (["-v"], Verbosity.VERBOSE, "starting "),
     (["-q"], Verbosity.QUIET, "")],
)  # fmt: skip
def test_how_much_it_prints(pipeline, capsys, runs, options, verbosity, begins):
    assert main(["run", str(pipeline), *options]) == 0
    assert runs[0][2] is verbosity
    out = capsys.readouterr().out
    assert out.startswith(begins) and bool(out) == bool(begins)


def test_it_cannot_print_more_and_less(pipeline, capsys, runs):
    assert main(["run", str(pipeline), "-v", "-q"]) == 2
    assert "'--verbose': not allowed together with --quiet" in capsys.readouterr().err
    assert runs == []


def test_a_dry_run_says_what_would_start_where_and_writes_nothing(pipeline, capsys, runs, monkeypatch):
    monkeypatch.chdir(pipeline.parent)
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    before = sorted(Path().rglob("*"))
    overrides = ["groups.more={cpus_per_node: 2, nodes: 2}", "engines.generator.group=more"]
    assert main(["run", "p.yaml", "--dry-run", *overrides]) == 0
    out = capsys.readouterr().out
    assert "run folder runs/tiny: the run begins\nRay: joins the cluster at 10.0.0.1:6379\n" in out
    lines = [line.split() for line in out.splitlines()]
    assert ["actor", "megatron", "2", "all", "1:", "0-1"] in lines
    assert ["generator", "hf", "4", "more", "1:", "0-1,", "2:", "2-3"] in lines
    assert out.endswith("nothing was started or written\n")
    assert sorted(Path().rglob("*")) == before and runs == []


def test_a_dry_run_refuses_what_a_run_refuses(pipeline, capsys, monkeypatch, tmp_path):
    assert main(["run", str(pipeline), "run.step=3", "--dry-run"]) == 2
    assert "unknown key `step`" in capsys.readouterr().err
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("")
    assert main(["run", str(pipeline), "--dry-run", "--run-dir", str(tmp_path / "mine")]) == 2
    assert capsys.readouterr().err.startswith("dagrl run: ")


def test_a_dry_run_exits_as_the_plan_where_it_does_not_fit(pipeline, capsys, runs):
    overrides = [
        "groups.all={gpus_per_node: 1, gpu: L4}",
        "model.init.hidden_size=4096",
        "model.init.num_hidden_layers=8",
    ]
    assert main(["run", str(pipeline), "--dry-run", *overrides]) == 3
    assert "dagrl plan: " in capsys.readouterr().err


def test_a_part_has_a_folder_of_its_own_beside_the_trainers(pipeline, tmp_path, runs):
    only = ["--run-dir", str(tmp_path / "r")]
    assert main(["run", str(pipeline), "--only", "advantage,update", *only]) == 0
    assert main(["run", str(pipeline), "--only", "rollout, reward", "schedule.max_staleness=2", "--explorer", "2/3",
                 *only]) == 0  # fmt: skip
    assert main(["run", str(pipeline), "--only", "rollout,reward", "--experience", str(tmp_path / "x"), *only]) == 0
    assert [(str(call[1]), str(call[3])) for call in runs] == [
        (str(tmp_path / "r"), str(tmp_path / "r" / "experience")),
        (str(tmp_path / "r-explorer-2of3"), str(tmp_path / "r" / "experience")),
        (str(tmp_path / "r-explorer-1of1"), str(tmp_path / "x")),
    ]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--explorer", "1/2"], "needs --only"),
        (["--experience", "x"], "needs --only"),
        (["--only", ","], "expected names of nodes"),
        (["--only", "rollout,reward", "--explorer", "3/2"], "such as 2/3"),
        (["--only", "advantage,update", "--explorer", "1/2"], "trained on it"),
        (["--only", "rollout,reward", "--explorer", "1/3"], "schedule.max_staleness=2"),
        (["--only", "rollout,reward", "schedule.weights_every=3"], "schedule.max_staleness=2"),
        (["--only", "rollout,reword"], "`reward`"),
        (["--only", "rollout,reward", "run.record=[update]"], "run.record=null"),
    ],
)
def test_a_part_that_is_not_possible_is_one_sentence(pipeline, capsys, runs, arguments, words):
    assert main(["run", str(pipeline), *arguments]) == 2
    said = " ".join(capsys.readouterr().err.replace("│", "").split())
    assert words in said and not runs


@pytest.mark.parametrize("command", ["validate", "graph"])
def test_parts_can_be_looked_at(pipeline, capsys, command):
    assert main([command, str(pipeline), "--only", "advantage,update"]) == 0
    said = capsys.readouterr().out
    assert ("experience  (of the other part)" in said) == (command == "graph")
    assert main([command, str(pipeline), "--only", "reward"]) == 2
    assert "nodes are left out before" in capsys.readouterr().err


def test_a_dry_run_of_a_part_names_what_it_starts(pipeline, capsys, tmp_path):
    folder = str(tmp_path / "r")
    assert main(["run", str(pipeline), "--only", "rollout,reward", "--dry-run", "--run-dir", folder]) == 0
    said = capsys.readouterr().out
    assert "r-explorer-1of1" in said and "generator" in said and "actor" not in said.split("would start")[1]
