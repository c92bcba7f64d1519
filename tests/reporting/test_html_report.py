"""What goes into the file of a report."""

from __future__ import annotations

from pathlib import Path

import pytest
from finished_runs import sample, write_run, write_samples

from dagrl.cli import main
from dagrl.reporting import html_report
from dagrl.reporting.html_report import distinct_names, spread, write_html


@pytest.mark.parametrize(
    ("count", "told"), [(5, [1, 2, 3, 4, 5]), (9, [1, 2, 3, 4, 5]), (3, [1, 3, 5]), (2, [1, 5]), (1, [1])]
)
def test_steps_are_spread_from_the_first_to_the_last(count: int, told: list[int]) -> None:
    assert spread([1, 2, 3, 4, 5], count) == told


def test_runs_have_as_many_parts_of_their_paths_as_tell_them_apart(tmp_path: Path) -> None:
    assert distinct_names([tmp_path / "a", tmp_path / "b"]) == ["a", "b"]
    assert distinct_names([tmp_path / "x/run", tmp_path / "y/run"]) == ["x/run", "y/run"]
    assert distinct_names([]) == []


def test_the_newest_samples_are_kept_where_there_are_too_many(tmp_path: Path, monkeypatch) -> None:
    run = write_run(tmp_path / "run")
    for step in range(1, 5):
        write_samples(run, step, [sample(0, response=f"{step}" * 50)])
    write_html([run], tmp_path / "all.html")
    all_of_them = (tmp_path / "all.html").read_text()
    monkeypatch.setattr(html_report, "_SAMPLES_BYTES", 700)
    write_html([run], tmp_path / "some.html")
    some = (tmp_path / "some.html").read_text()
    assert [f'id="0/samples/train/{step}"' in all_of_them for step in range(1, 5)] == [True] * 4
    kept = [f'id="0/samples/train/{step}"' in some for step in range(1, 5)]
    assert kept == sorted(kept) and kept[-1] and not kept[0]


def test_the_file_is_written_beside_the_run_and_in_one_go(tmp_path: Path, capsys) -> None:
    run = write_run(tmp_path / "run")
    assert main(["report", str(run), "--html"]) == 0
    assert capsys.readouterr().out.startswith(f"{run / 'report.html'}: ")
    before = (run / "report.html").read_bytes()
    (run / "samples").mkdir()
    (run / "samples" / "step_1.parquet").write_text("torn")
    assert main(["report", str(run), "--html"]) == 2
    assert "step_1.parquet" in capsys.readouterr().err
    assert (run / "report.html").read_bytes() == before and not list(run.glob(".*.new"))


def test_a_run_without_a_readable_pipeline_is_shown_all_the_same(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    (run / "pipeline.yaml").write_text("name: [\n")
    assert write_html([run], run / "report.html")
