"""`dagrl doctor` on this machine, and on one that lacks packages."""

import subprocess
import sys
from pathlib import Path

from dagrl.cli import main
from dagrl.doctor.findings import hint, missing, ok


def test_lines_are_printed_by_section_and_counted(capsys, monkeypatch):
    def examine():
        yield "machine", iter([ok("processor", "4 cores"), hint("GPUs", "none")])
        yield "software", iter([missing("torch", "cannot be imported: [x]")])

    monkeypatch.setattr("dagrl.doctor.examination.examine", examine)
    assert main(["doctor"]) == 1
    assert capsys.readouterr().out == (
        "machine\n"
        "  ok       processor              4 cores\n"
        "  hint     GPUs                   none\n"
        "software\n"
        "  missing  torch                  cannot be imported: [x]\n"
        "1 missing, 1 hint\n"
    )


def test_each_section_is_printed_before_the_next_is_examined(capsys, monkeypatch):
    printed = []

    def examine():
        yield "machine", iter([ok("processor", "4 cores")])
        printed.append(capsys.readouterr().out)
        yield "software", iter([])

    monkeypatch.setattr("dagrl.doctor.examination.examine", examine)
    assert main(["doctor"]) == 0
    assert printed == ["machine\n  ok       processor              4 cores\n"]


def test_packages_that_cannot_be_imported_are_lines_not_tracebacks(tmp_path: Path):
    for name in ("torch", "ray"):
        (tmp_path / f"{name}.py").write_text("raise ImportError('not here')")
    done = subprocess.run(
        [sys.executable, "-m", "dagrl", "doctor"],
        env={"PYTHONPATH": f"{tmp_path}:{Path(__file__).parents[2]}", "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert (done.returncode, done.stderr) == (1, "")
    assert "torch                  cannot be imported: ImportError: not here" in done.stdout
    assert "ray                    cannot be imported: ImportError: not here" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("2 missing")
