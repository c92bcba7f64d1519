import sys
import time
from pathlib import Path

import psutil
import pytest


@pytest.fixture(scope="module")
def h200():
    sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
    try:
        import h200

        yield h200
    finally:
        sys.path.pop(0)


@pytest.mark.parametrize("gpus", [1, 2, 4, 8])
def test_what_is_planned_exists(h200, gpus: int, tmp_path: Path) -> None:
    parts = h200.parts(gpus, tmp_path, tmp_path)
    assert len({part.name for part in parts}) == len(parts)
    for part in parts:
        files = [word for word in part.command if word.endswith(".py")]
        assert files and all((h200.ROOT / file).is_file() for file in files), part


def test_a_part_over_its_limit_is_ended_with_all_its_processes(h200, tmp_path: Path) -> None:
    child = "import subprocess; print(subprocess.Popen(['sleep', '60']).pid, flush=True); import time; time.sleep(60)"
    begun = time.monotonic()
    code, log = h200._run(h200.Part("slow", ("-c", child), limit_s=3), tmp_path)
    assert code is None and time.monotonic() - begun < 30
    pid = int(log.read_text())
    deadline = time.monotonic() + 10
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, "the part's own process outlived it"
        time.sleep(0.05)


def test_a_part_that_fails_says_so(h200, tmp_path: Path) -> None:
    code, log = h200._run(h200.Part("failing", ("-c", "print('told'); raise SystemExit(3)"), limit_s=30), tmp_path)
    assert code == 3 and log.read_text() == "told\n"
