"""Which file a template's relative path names; a wheel's own cases are in test_wheel.py."""

from __future__ import annotations

from pathlib import Path

from dagrl.resources import OWN_TEMPLATES, path_in_template


def test_data_beside_templates_is_theirs(tmp_path: Path) -> None:
    found = path_in_template(OWN_TEMPLATES, "data/addition/train.parquet", tmp_path / "p.yaml")
    assert found == OWN_TEMPLATES / "data/addition/train.parquet" and found.is_file()


def test_data_outside_of_templates_is_the_projects(tmp_path: Path) -> None:
    assert path_in_template(OWN_TEMPLATES, "../data/x/y.parquet", tmp_path / "p.yaml") == tmp_path / "data/x/y.parquet"


def test_files_of_the_repository_are_found(tmp_path: Path) -> None:
    assert path_in_template(OWN_TEMPLATES, "../README.md", tmp_path / "p.yaml").samefile(OWN_TEMPLATES / "../README.md")


def test_a_template_of_the_repository_names_the_repositorys_data() -> None:
    found = path_in_template(OWN_TEMPLATES, "../data/x/y.parquet", OWN_TEMPLATES / "grpo.yaml")
    assert found == OWN_TEMPLATES / "../data/x/y.parquet"


def test_a_path_of_another_file_is_relative_to_it(tmp_path: Path) -> None:
    assert path_in_template(tmp_path, "../data/y.parquet", tmp_path / "p.yaml") == tmp_path / "../data/y.parquet"
    assert path_in_template(OWN_TEMPLATES, "/data/y.parquet", tmp_path / "p.yaml") == Path("/data/y.parquet")
