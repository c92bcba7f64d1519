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
    ("call", "named"),
    [
        (["plan", "P", "--gpu", ""], "GPU"),
        (["plan", "P", "--gpu", " "], "GPU"),
        (["plan", "P", "--gpu", "H201"], "`H20`"),
        (["plan", "P", "--search", "--gpu", "", "--gpus", "1"], "GPU"),
        (["plan", "P", "--simulate", ""], "--simulate"),
        (["plan", "P", "--simulate", "."], " .: "),
        (["plan", "P", "--simulate", "nowhere/plan.json"], "nowhere/plan.json"),
        (["plan", "P", "--search", "--gpus", "0"], "--gpus"),
        (["plan", "P", "--search", "--gpus", ""], "--gpus"),
        (["plan", "P", "--search", "--nodes", " "], "--nodes"),
        (["plan", "P", "--search", "--top", "0"], "--top"),
        (["plan", "P", "--response-tokens", ""], "--response-tokens"),
        (["plan", "P", "--response-tokens", "0"], "between 1 and 8"),
        (["plan", "P", "--response-tokens", "-1"], "between 1 and 8"),
        (["plan", "P", "--response-tokens", "nan"], "between 1 and 8"),
        (["plan", "P", "--prompt-tokens", "-1"], "between 1 and 16"),
        (["plan", "P", "--prompt-tokens", "nan"], "between 1 and 16"),
        (["plan", ""], "PIPELINE"),
        (["validate", " "], "PIPELINE"),
        (["graph", "P", "-o", ""], "--output"),
        (["graph", "P", "-o", "dag.pdf"], "dag.pdf"),
        (["graph", "P", "-o", "dag"], ".svg"),
        (["graph", "P", "-o", "nowhere/dag.svg"], "nowhere"),
        (["run", "P", "--run-dir", ""], "--run-dir"),
        (["report", ""], "RUN"),
        (["report", RUN], "metrics.jsonl"),
        (["report", RUN, "--gpu", "H200"], "--gpu"),
        (["report", RUN, "--gpu", ""], "--gpu"),
        (["report", RUN, "--html", "--timeline"], "--timeline"),
        (["report", RUN, "-o", "x.html"], "--output"),
        (["report", RUN, RUN], "--html"),
        (["report", RUN, "--html"], RUN),
        (["ui", "nowhere"], "nowhere"),
        (["ui", RUN, "--port", "70000"], "--port"),
        (["report", RUN, "--timeline", "--gpu", ""], "GPU"),
        (["export", RUN, "-o", ""], "--output"),
        (["export", RUN, "-o", "x", "--step", "x"], "--step"),
        (["export", RUN, "-o", "x", "--step", "1", "--best"], "--best"),
        (["export", RUN, "-o", "x"], "pipeline.yaml"),
        (["convert", "P", "-o", "x", "--to", "gguf"], "--to"),
        (["convert", "", "-o", "x", "--to", "hf"], "SOURCE"),
        (["convert", RUN, "-o", "x", "--to", "hf", "--model", ""], "--model"),
        (["trian", "P"], "trian"),
        ([], "--help"),
    ],
    ids=str,
)
def test_a_call_that_names_nothing_is_one_sentence(pipeline, call, named, capsys, monkeypatch):
    monkeypatch.chdir(pipeline.parent)
    Path(RUN).mkdir()
    assert main([str(pipeline) if argument == "P" else argument for argument in call]) == 2
    told = capsys.readouterr()
    assert named in told.err
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
