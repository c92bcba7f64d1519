"""What the comparison of plans and runs makes of figures."""

import json
from pathlib import Path

import pytest

from dagrl.planner.showing.report import report


@pytest.fixture(scope="module")
def accuracy(benchmark_module):
    return benchmark_module("plan_accuracy")


@pytest.fixture(scope="module")
def dagrl_run(benchmark_module):
    return benchmark_module("dagrl_run")


def test_every_case_can_be_planned_and_fits(accuracy, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # As on a machine with H200s: nothing of it is asked of a GPU.
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "NVIDIA H200")
    for name, case in accuracy.CASES.items():
        folder = tmp_path / case.model
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(accuracy.MODELS[case.model]))
        pipeline = accuracy.pipeline_of(name, case, folder, tmp_path / "prompts.parquet")
        file = tmp_path / "pipeline.yaml"
        file.write_text(json.dumps(pipeline))
        planned = report(file, ())
        assert planned.fits, (name, planned.fit.problems)
        assert {tenant.executor.sleeps for group in planned.fit.groups for tenant in group.tenants} == {
            case.sleep and not case.servers
        }
        figures = accuracy.planned_figures(planned, case.load)
        wanted = {"memory/update_peak_gib", "driver/update_gib", "driver/rollout_gib", "time/step_s", "sync"}
        wanted |= {f"time/{node}_s" for node in ("rollout", "old", "update")}
        assert wanted <= figures.keys()
        # To wake an engine whose memory rests on the host takes no time.
        assert all(figure > 0 for name, figure in figures.items() if not name.startswith("wake"))


def test_measured_are_medians_of_seconds_and_peaks_of_memory(accuracy, dagrl_run) -> None:
    metrics = [
        {"step": step, "time/update_s": seconds, "memory/update_peak_gib": gib}
        for step, seconds, gib in [(1, 2.0, 50.0), (2, 4.0, 60.0), (3, 3.0, 55.0)]
    ]
    events = [
        dagrl_run.Event(name, name, start, end, 1, worker)
        for name, start, end, worker in [
            ("update", 10.0, 20.0, "actor/0"),
            ("sleep", 20.0, 21.5, "actor/0"),
            ("sync", 21.5, 21.8, "generator/0"),
            ("rollout", 22.0, 30.0, "generator/0"),
        ]
    ]
    held = [(9.0, 99.0), (12.0, 70.0), (15.0, 71.0), (25.0, 120.0)]
    assert accuracy.measured_figures(metrics, events, held) == pytest.approx(
        {
            "time/update_s": 3.0,
            "memory/update_peak_gib": 60.0,
            "sleep actor": 0.5,
            "sync": 0.1,
            "driver/update_gib": 71.0,
            "driver/rollout_gib": 120.0,
        }
    )


def test_the_table_has_both_and_how_far_they_are_apart(accuracy) -> None:
    planned = {"driver/update_gib": 110.0, "time/update_s": 9.0, "time/step_s": 20.0, "time/reward_s": 1.0}
    compared = accuracy.figures(planned, {"driver/update_gib": 100.0, "time/update_s": 10.0, "time/step_s": 25.0})
    assert [each.what for each in compared] == ["driver/update_gib", "time/update_s", "time/step_s"]
    verdicts = accuracy.verdicts(compared)
    assert [verdict.value for verdict in verdicts] == pytest.approx([0.1, 0.2])
    told = {"gpus": 2, "compared": [[each.what, each.unit, each.planned, each.measured] for each in compared]}
    *_, line = accuracy.table({"case": told})
    assert line == "| case | 2 |  | 110 / 100 (+10%) |  |  |  | 9 / 10 (-10%) | 20 / 25 (-20%) |"


def test_a_summary_plans_anew_what_ran_elsewhere(accuracy, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "NVIDIA H200")
    name = "1.7b_tp2"
    pipeline = accuracy.pipeline_of(name, accuracy.CASES[name], Path("/gone/with/its/machine"), tmp_path / "gone")
    (tmp_path / "plan_1_7b_tp2_run.yaml").write_text(json.dumps(pipeline))
    old = {"gpus": 2, "compared": [["time/step_s", "s", 1.0, 12.21]], "verdicts": [{"met": False}]}
    again = accuracy.planned_again(old, tmp_path, name)
    [[what, unit, planned, measured]] = again["compared"]
    assert (what, unit, measured) == ("time/step_s", "s", 12.21)
    assert planned == again["planned"]["time/step_s"] > 1.0
    assert again["verdicts"] == [{"met": True}]
