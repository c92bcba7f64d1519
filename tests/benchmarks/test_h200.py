import time
from pathlib import Path

import psutil
import pytest


@pytest.fixture(scope="module")
def h200(benchmark_module):
    return benchmark_module("h200")


@pytest.mark.parametrize("suite", ["trainer", "rollout", "plan", "lora", "models", "agents", "fp8", "speed", "why"])
@pytest.mark.parametrize("gpus", [1, 2, 4, 8])
def test_the_planned_layout_exists_and_fits(h200, suite: str, gpus: int, tmp_path: Path) -> None:
    parts = h200.parts(suite, gpus, tmp_path, tmp_path)
    assert len({part.name for part in parts}) == len(parts)
    for part in parts:
        files = [word for word in part.command if word.endswith((".py", ".yaml"))]
        assert files and all((h200.ROOT / file).is_file() for file in files), part
        assert 1 <= part.gpus <= gpus


def test_a_part_over_its_limit_is_ended_with_all_its_processes(h200, tmp_path: Path) -> None:
    child = "import subprocess; print(subprocess.Popen(['sleep', '60']).pid, flush=True); import time; time.sleep(60)"
    begun = time.monotonic()
    assert h200.run_all([h200.Part("slow", ("-c", child), limit_s=3)], 1, tmp_path, 60) == {"slow": "over its 3 s"}
    assert time.monotonic() - begun < 30
    pid = int((tmp_path / "slow.log").read_text())
    deadline = time.monotonic() + 10
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, "the part's own process outlived it"
        time.sleep(0.05)


def test_a_part_that_fails_stops_no_other_and_the_summary_has_what_was_found(h200, tmp_path: Path) -> None:
    failing = h200.Part("failing", ("-c", "print('NOT fast enough'); raise SystemExit(3)"), limit_s=30)
    after_it = h200.Part("after", ("-c", "print('ok  as fast as it should be')"), limit_s=30)
    assert h200.run_all([failing, after_it], 1, tmp_path, 60) == {"failing": "exit code 3", "after": "ok"}
    summary = (tmp_path / "summary.txt").read_text()
    assert "exit code 3\n    NOT fast enough\n" in summary and "    ok  as fast as it should be\n" in summary


def test_parts_beside_each_other_see_gpus_of_their_own(h200, tmp_path: Path) -> None:
    tell = "import os, time; print(os.environ['CUDA_VISIBLE_DEVICES']); time.sleep(0.5)"
    parts = [h200.Part(f"part_{number}", ("-c", tell), limit_s=30, gpus=2) for number in range(3)]
    h200.run_all(parts, 4, tmp_path, 60)
    seen = [(tmp_path / f"part_{number}.log").read_text().strip() for number in range(3)]
    assert seen[:2] == ["0,1", "2,3"] and seen[2] in seen[:2]


def test_nothing_begins_after_the_last_moment(h200, tmp_path: Path) -> None:
    waiting = h200.Part("waiting", ("-c", "pass"), limit_s=30)
    assert h200.run_all([waiting], 1, tmp_path, -1) == {"waiting": "not begun in time"}


def test_only_parts_that_allow_it_share_a_gpu(h200) -> None:
    alone, small, wide = (
        h200.Part(name, (), 1, gpus=gpus, at_once=at_once)
        for name, gpus, at_once in [("alone", 1, 1), ("small", 1, 2), ("wide", 2, 2)]
    )
    desk = h200.Desk(3)
    assert desk.take(alone) == (0,)
    assert desk.take(small) == (1,)
    assert desk.take(wide) == (1, 2)
    assert desk.take(alone) is None, "the only GPU with room is shared"
    assert desk.take(small) == (2,)
    assert desk.take(small) is None
    desk.give_back(small, (1,))
    desk.give_back(wide, (1, 2))
    assert desk.take(alone) == (1,)
