"""How `dagrl` parses a call, and what it says of a wrong one."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import dagrl
from dagrl.cli import main

RUN = "RUN"
"""Stands for a folder, beside the pipeline, that holds no run."""


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (["plan", "P", "--gpu", ""], "no GPU is known as ''; choose from: "),
        (["plan", "P", "--gpu", " "], "no GPU is known as ' '; choose from: "),
        (["plan", "P", "--gpu", "H201"], "no GPU is known as 'H201'; did you mean `H20`?"),
        (["plan", "P", "--search", "--gpu", "", "--gpus", "1"], "no GPU is known as ''"),
        (["plan", "P", "--simulate", ""], "invalid value for '--simulate': expected a path, got an empty text"),
        (["plan", "P", "--simulate", "."], "cannot write .: Is a directory"),
        (["plan", "P", "--simulate", "nowhere/plan.json"], "cannot write nowhere/plan.json: No such file or directory"),
        (["plan", "P", "--search", "--gpus", "0"], "invalid value for '--gpus': "),
        (["plan", "P", "--search", "--gpus", ""], "invalid value for '--gpus': "),
        (["plan", "P", "--search", "--nodes", " "], "invalid value for '--nodes': "),
        (["plan", "P", "--search", "--top", "0"], "invalid value for '--top': "),
        (["plan", "P", "--response-tokens", ""], "invalid value for '--response-tokens': "),
        (["plan", "P", "--response-tokens", "0"], "choose a number between 1 and 8"),
        (["plan", "P", "--response-tokens", "-1"], "choose a number between 1 and 8"),
        (["plan", "P", "--response-tokens", "nan"], "choose a number between 1 and 8"),
        (["plan", "P", "--prompt-tokens", "-1"], "choose a number between 1 and 16"),
        (["plan", "P", "--prompt-tokens", "nan"], "choose a number between 1 and 16"),
        (["plan", ""], "invalid value for 'PIPELINE': expected a path, got an empty text"),
        (["validate", " "], "invalid value for 'PIPELINE': expected a path, got an empty text"),
        (["graph", "P", "-o", ""], "invalid value for '--output' / '-o': expected a path, got an empty text"),
        (["graph", "P", "-o", "dag.pdf"], "dag.pdf does not say a format; end it in .svg, .png, .mmd or .txt"),
        (["graph", "P", "-o", "dag"], "dag does not say a format; end it in .svg, .png, .mmd or .txt"),
        (["graph", "P", "-o", "nowhere/dag.svg"], "there is no folder nowhere; make it first"),
        (["run", "P", "--run-dir", ""], "invalid value for '--run-dir': expected a path, got an empty text"),
        (["report", ""], "invalid value for 'RUN': expected a path, got an empty text"),
        (["report", RUN], "holds no metrics.jsonl: no run has written there"),
        (["report", RUN, "--gpu", "H200"], "--gpu is for --timeline and --html; add one of them, or remove it"),
        (["report", RUN, "--gpu", ""], "--gpu is for --timeline and --html; add one of them, or remove it"),
        (["report", RUN, "--html", "--timeline"], "--html has the tables of --timeline; leave one of them out"),
        (["report", RUN, "-o", "x.html"], "--output is for --html; add that, or remove it"),
        (["report", RUN, RUN], "several runs are for --html; add that, or name one run"),
        (["report", RUN, "--html"], "no run has written there"),
        (["ui", "nowhere"], "nowhere is not a folder; name run folders, or a folder that holds some"),
        (["ui", RUN, "--port", "70000"], "invalid value for '--port': "),
        (["report", RUN, "--timeline", "--gpu", ""], "no GPU is known as ''"),
        (["export", RUN, "-o", ""], "invalid value for '--output' / '-o': expected a path, got an empty text"),
        (["export", RUN, "-o", "x", "--step", "x"], "invalid value for '--step': "),
        (
            ["export", RUN, "-o", "x", "--step", "1", "--best"],
            "invalid value for '--best': not allowed together with --step",
        ),
        (["export", RUN, "-o", "x"], "is no run folder: it has no pipeline.yaml"),
        (
            ["convert", "P", "-o", "x", "--to", "gguf"],
            "invalid value: --to takes hf or a backend (",
        ),
        (["convert", "", "-o", "x", "--to", "hf"], "invalid value for 'SOURCE': expected a path, got an empty text"),
        (["convert", RUN, "-o", "x", "--to", "hf", "--model", ""], "invalid value for '--model': expected a path"),
        (["trian", "P"], "dagrl: no such command 'trian'"),
        ([], "dagrl: missing command; see `dagrl --help`"),
    ],
    ids=str,
)
def test_a_call_that_names_nothing_is_one_sentence(pipeline, call, message, capsys, monkeypatch):
    monkeypatch.chdir(pipeline.parent)
    Path(RUN).mkdir()
    assert main([str(pipeline) if argument == "P" else argument for argument in call]) == 2
    told = capsys.readouterr()
    assert message in told.err
    assert told.err.count("\n") == 1


_LONG, _WORDS = "9" * 5000, "word " * 2000


@pytest.mark.parametrize(
    "call",
    [
        ["validate", "P", f"run.steps={_LONG}"],
        ["validate", "P", f"run.steps='{_WORDS}'"],
        ["validate", "P", f"{_LONG}=3"],
        ["validate", "P", _LONG],
        ["validate", "P", "--json", f"run.steps={_LONG}"],
        ["validate", "P", "--json", f"{_LONG}=1"],
        ["validate", "P", f"nodes.{_LONG}={{op: reward, fn: math}}"],
        ["validate", "P", f"engines.actor.environment={_LONG}"],
        ["validate", "P", f"--{_LONG}"],
        ["validate", _LONG],
        ["graph", "P", "-o", _LONG],
        ["plan", "P", "--gpu", _LONG],
        ["plan", "P", "--gpu", _WORDS],
        ["run", "P", "--run-dir", _LONG],
        *([command, _LONG] for command in ("report", "why", "ui", "run", "init", "data", "templates", "import")),
        ["export", _LONG, "-o", "x"],
        ["convert", RUN, "-o", "x", "--to", _LONG],
        ["convert", _LONG, "-o", "x", "--to", "megatron"],
        ["diff", _LONG, _LONG],
        ["init", "x", "--template", _LONG],
        ["import", RUN, "--from", _LONG],
        [_LONG],
    ],
    ids=lambda call: " ".join(word[:20] for word in call),
)
def test_long_values_are_not_echoed_whole(pipeline, call, capsys, monkeypatch):
    monkeypatch.chdir(pipeline.parent)
    Path(RUN).mkdir()
    assert main([str(pipeline) if argument == "P" else argument for argument in call]) == 2
    told = capsys.readouterr()
    assert 0 < len(told.err + told.out) < 4500 and _LONG not in told.err + told.out


def test_a_key_with_dashes_gets_the_right_spelling(pipeline, capsys):
    assert main(["validate", str(pipeline), "--run.steps=3"]) == 2
    hint = "no such option: --run.steps; set a key without dashes, for example run.steps=10"
    assert hint in capsys.readouterr().err


def test_the_command_is_installed(pipeline):
    command = shutil.which("dagrl", path=str(Path(sys.executable).parent))
    assert command is not None
    done = subprocess.run([command, "validate", str(pipeline), "run.steps=x"], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("command line:1: override run.steps=x: got 'x'; ")
    assert done.stderr.count("\n") == 1


def test_help_names_the_commands(capsys):
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    for command in (
        "validate",
        "graph",
        "plan",
        "run",
        "launch",
        "report",
        "ui",
        "why",
        "replay",
        "diff",
        "export",
        "convert",
        "doctor",
    ):
        assert f"\n  {command} " in out


def test_version_is_printed(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"dagrl {dagrl.__version__}\n"


def test_overrides_may_follow_an_option(pipeline, capsys):
    assert main(["plan", str(pipeline), "name=first", "--response-tokens", "1", "name=second", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["pipeline"] == "second"


def test_the_home_folder_is_expanded(pipeline, monkeypatch):
    monkeypatch.setenv("HOME", str(pipeline.parent))
    assert main(["graph", f"~/{pipeline.name}"]) == 0
    assert main(["graph", "~/p.yaml", "-o", "~/dag.mmd"]) == 0
    assert (pipeline.parent / "dag.mmd").is_file()


def test_an_interrupt_exits_with_130(pipeline, capsys, monkeypatch):
    def interrupt(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr("dagrl.config.loading.loader.load_pipeline", interrupt)
    assert main(["graph", str(pipeline)]) == 130
    assert capsys.readouterr().err == "dagrl: interrupted\n"
