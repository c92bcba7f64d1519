"""`dagrl data`: the scripts of data_preprocess/ as a command."""

import pytest

from dagrl.cli import main
from dagrl.resources import data_script_names

MADE = ("arithmetic", "digits", "games", "word_problems")
"""Scripts that make their data."""


@pytest.mark.parametrize("name", data_script_names())
def test_user_errors_end_every_script_with_2(name, tmp_path, capsys):
    (tmp_path / "file").touch()
    options = ["--local_dir", str(tmp_path / "file" / "data")]
    options += ["--game", "Nothing-v1"] if name == "games" else []
    options += ["--source", str(tmp_path / "nowhere")] if name not in MADE else []
    assert main(["data", name, *options]) == 2
    (sentence,) = capsys.readouterr().err.splitlines()
    assert sentence.startswith(f"{name}.py: ")
