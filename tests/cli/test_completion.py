"""Completion in shells: `dagrl` as their scripts call it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dagrl.cli import main
from dagrl.resources import template_names


@pytest.fixture
def proposed(monkeypatch, capsys):
    """The proposals for the last word of a line, as bash asks for them."""

    def complete(line: str) -> list[str]:
        words = line.split(" ")
        monkeypatch.setenv("_DAGRL_COMPLETE", "complete_bash")
        monkeypatch.setenv("COMP_WORDS", line)
        monkeypatch.setenv("COMP_CWORD", str(len(words) - 1))
        with pytest.raises(SystemExit):
            main([])
        return capsys.readouterr().out.split()

    return complete


def test_commands_options_and_templates(proposed) -> None:
    assert proposed("dagrl va") == ["validate"]
    assert "--dry-run" in proposed("dagrl run x --")
    assert proposed("dagrl templates tiny_gr") == ["tiny_grpo"]
    assert proposed("dagrl init --template opm") == ["opmd"]
    assert proposed("dagrl data gsm8k_") == ["gsm8k_tools"]
    assert proposed("dagrl plan x --gpu H200-") == ["H200-NVL"]


def test_pipelines_are_files_folders_and_templates(proposed, pipeline: Path, monkeypatch) -> None:
    monkeypatch.chdir(pipeline.parent)
    Path("runs").mkdir()
    assert proposed("dagrl run ") == ["p.yaml", "runs/", *template_names()]
    assert proposed("dagrl run p") == ["p.yaml", "ppo"]
    assert proposed("dagrl report r") == ["runs/"]


def test_keys_are_those_of_the_pipeline_and_the_schema(proposed, pipeline: Path) -> None:
    call = f"dagrl run {pipeline}"
    assert set(proposed(f"{call} ru")) >= {"run.steps=", "run.save_every="}
    assert proposed(f"{call} engines.") == ["engines.actor.", "engines.generator."]
    keys = proposed(f"{call} engines.actor.")
    assert {"engines.actor.optimizer.", "engines.actor.parallel.", "engines.actor.group="} <= set(keys)
    assert not any("server" in key for key in keys), "a key of another backend"
    assert "nodes.rollout.sampling.max_new_tokens=" in proposed(f"{call} nodes.rollout.sampling.max")
    assert proposed(f"{call} run.steps=1") == []


def test_a_pipeline_that_cannot_be_read_has_no_keys(proposed, tmp_path: Path) -> None:
    (tmp_path / "p.yaml").write_text("a: [")
    assert proposed(f"dagrl run {tmp_path / 'p.yaml'} ru") == []
    assert proposed(f"dagrl run {tmp_path / 'none.yaml'} ru") == []


def test_engines_of_a_run(proposed, tmp_path: Path) -> None:
    (tmp_path / "pipeline.yaml").write_text("engines: {actor: {}, critic: {}}\nnodes: {update: {}}\n")
    assert proposed(f"dagrl export {tmp_path} --engine a") == ["actor"]
    assert proposed(f"dagrl export {tmp_path / 'none'} --engine a") == []


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_script_is_printed_for_a_shell(shell: str) -> None:
    variables = os.environ | {"_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    command = [sys.executable, "-m", "dagrl", "--show-completion", shell]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0 and "_DAGRL_COMPLETE" in done.stdout
