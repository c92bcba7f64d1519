"""`dagrl init`, `dagrl templates` and `dagrl data`."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from typer.main import get_command

from dagrl.cli import app, main
from dagrl.resources import template_description, template_names, template_parents, template_text

PROJECT = {".gitignore", "README.md", "pipeline.yaml", "rewards.py", "test_rewards.py"}


def files(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_project_validates_and_tests_its_reward(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["init", "my sums", "--template", "tiny_grpo"]) == 0
    out = capsys.readouterr().out
    assert "my sums/pipeline.yaml\n" in out and out.endswith("next: cd 'my sums' && dagrl validate pipeline.yaml\n")
    project = tmp_path / "my sums"
    assert files(project) == PROJECT
    assert main(["validate", str(project / "pipeline.yaml"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["pipeline"] == "my-sums"
    assert 'reward: {fn: "rewards:score"}' in (project / "pipeline.yaml").read_text()
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    tested = subprocess.run(command, cwd=project, capture_output=True, text=True, timeout=240)
    assert tested.returncode == 0 and "6 passed" in tested.stdout, tested.stdout


def test_the_readme_has_commands_that_parse_and_those_of_the_template(tmp_path: Path) -> None:
    assert main(["init", str(tmp_path / "mine"), "--template", "gspo"]) == 0
    lines = [line.strip() for line in (tmp_path / "mine/README.md").read_text().splitlines() if line.startswith("    ")]
    assert lines[:2] == [
        "hf download Qwen/Qwen3-1.7B --local-dir ~/models/Qwen3-1.7B",
        "dagrl data gsm8k --local_dir data/gsm8k",
    ]
    for line in lines[1:]:
        name, *arguments = shlex.split(line, comments=True)[1:]
        get_command(app).commands[name].make_context(name, arguments)


@pytest.mark.parametrize(("template", "start"), [("tiny_distill", "tiny_sft"), ("smollm2_grpo", "smollm2_sft")])
def test_the_readme_names_the_run_that_a_template_starts_from(tmp_path: Path, template: str, start: str) -> None:
    assert main(["init", str(tmp_path / "mine"), "--template", template]) == 0
    before, _, _ = (tmp_path / "mine/README.md").read_text().partition("dagrl validate")
    assert f"    dagrl run {start}\n" in before and f"dagrl run {template}" not in before


@pytest.mark.parametrize("template", ["tiny_grpo", "tiny_sft", "tiny_dapo", "tiny_hints"])
def test_the_readme_of_a_template_with_its_own_model_and_data_fetches_nothing(tmp_path: Path, template: str) -> None:
    assert main(["init", str(tmp_path / "mine"), "--template", template]) == 0
    readme = (tmp_path / "mine/README.md").read_text()
    assert "hf download" not in readme and "dagrl data" not in readme


def test_the_pages_that_a_project_names_are_there(tmp_path: Path) -> None:
    assert main(["init", str(tmp_path / "mine"), "--template", "gspo"]) == 0
    texts = [path.read_text() for path in (tmp_path / "mine").iterdir()]
    pages = [Path(page) for text in texts for page in re.findall(r"\S+\.md\b", text) if page != "README.md"]
    assert pages and all(page.is_absolute() and page.is_file() for page in pages), pages


def test_templates_are_merged(tmp_path: Path, capsys) -> None:
    assert main(["init", str(tmp_path / "p"), "--template", "dapo", "--template", "tiny"]) == 0
    assert main(["validate", str(tmp_path / "p/pipeline.yaml")]) == 0, capsys.readouterr().err


def test_a_template_without_a_reward_gets_none(tmp_path: Path) -> None:
    assert main(["init", str(tmp_path / "p"), "--template", "tiny_dpo"]) == 0
    assert files(tmp_path / "p") == PROJECT - {"rewards.py", "test_rewards.py"}
    assert "nodes:" not in (tmp_path / "p/pipeline.yaml").read_text()


@pytest.mark.parametrize("name", ["pipeline.yaml", "rewards.py"])
def test_a_file_that_is_there_ends_it(tmp_path: Path, name: str, capsys) -> None:
    (tmp_path / name).write_text("mine")
    assert main(["init", str(tmp_path), "--template", "tiny_grpo"]) == 2
    assert f"{tmp_path / name} exists, and nothing is overwritten" in capsys.readouterr().err
    assert files(tmp_path) == {name} and (tmp_path / name).read_text() == "mine"


def test_gitignore_and_readme_of_a_repository_are_kept(tmp_path: Path, capsys) -> None:
    (tmp_path / "README.md").write_text("mine")
    assert main(["init", str(tmp_path), "--template", "tiny_grpo", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["kept"] == [str(tmp_path / "README.md")]
    assert (tmp_path / "README.md").read_text() == "mine" and files(tmp_path) == PROJECT


@pytest.mark.parametrize(
    ("template", "message"),
    [("gropo", "there is no template `gropo`; did you mean `grpo`?"), ("tiny", "`tiny` is merged over a recipe")],
)
def test_a_template_that_makes_no_pipeline(tmp_path: Path, template: str, message: str, capsys) -> None:
    assert main(["init", str(tmp_path / "p"), "--template", template]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "p").exists()


def test_templates_are_listed_with_a_line_each(capsys) -> None:
    assert main(["templates"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == template_names()
    assert all(10 < len(template_description(name)) < 300 for name in template_names())
    assert template_description("drgrpo") == "Dr. GRPO (arXiv 2503.20783): GRPO without its two biases"
    assert template_description("mix").endswith("MIX of Trinity-RFT (arXiv 2505.17826)")


def test_a_template_is_printed(capsys) -> None:
    assert main(["templates", "gspo"]) == 0
    assert capsys.readouterr().out == template_text("gspo")
    assert main(["templates", "gspo", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["extends"] == template_parents("gspo") == ["grpo"] and found["text"] == template_text("gspo")
    assert main(["templates", "gsp"]) == 2
    assert "did you mean `gspo`?" in capsys.readouterr().err


def test_data_sets_are_listed_and_written(tmp_path: Path, capsys) -> None:
    assert main(["data", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert {"name": "gsm8k", "description": "Grade-school math questions (GSM8K, MIT licence) as prompts"} in listed
    assert main(["data", "arithmetic", "--local_dir", str(tmp_path)]) == 0
    assert {"train.parquet", "test.parquet"} <= files(tmp_path)
    assert main(["data", "gsm8k", "--local_dir", str(tmp_path / "g"), "--source", str(tmp_path / "none")]) == 2
    assert "gsm8k.py: " in capsys.readouterr().err
    assert main(["data", "gsm8"]) == 2
    assert "did you mean `gsm8k`" in capsys.readouterr().err


def test_the_help_of_a_script_is_its_own(capsys) -> None:
    assert main(["data", "arithmetic", "--help"]) == 0
    assert "--local_dir" in capsys.readouterr().out
