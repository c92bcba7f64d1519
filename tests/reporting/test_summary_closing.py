"""The last words of a run."""

import json
from pathlib import Path

import pytest

from dagrl.orchestrator.outcome import RunOutcome
from dagrl.reporting.summary import closing_text, in_words


@pytest.mark.parametrize(
    ("seconds", "told"), [(0.4, "0 s"), (36, "36 s"), (119.4, "119 s"), (125, "2 min"), (7201, "2 h 00 min")]
)
def test_durations_are_printed_in_words(seconds, told):
    assert in_words(seconds) == told


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rewards = [None, 0.25, 0.75, 0.5]
    lines = [{"step": step, "reward/mean": reward, "loss/policy": 1.0} for step, reward in enumerate(rewards)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path


@pytest.mark.parametrize(
    ("outcome", "first"),
    [
        (RunOutcome(3, stopped=False, seconds=36.4), "finished step 3 in 36 s"),
        (
            RunOutcome(3, stopped=True, seconds=300),
            "stopped after step 3 in 5 min; `dagrl run` with the same folder goes on",
        ),
        (
            RunOutcome(3, stopped=True, out_of_time=True, seconds=300),
            "stopped after step 3 in 5 min, as run.stop_after says; `dagrl run` with the same folder goes on",
        ),
        (
            RunOutcome(3, stopped=False, before=True),
            "finished step 3 before; nothing is left to do, a larger run.steps (or run.epochs) goes on",
        ),
    ],
)
def test_the_result_of_a_run_is_printed(folder, outcome, first):
    lines = closing_text(outcome, folder).splitlines()
    assert lines[:3] == [
        first,
        "  reward/mean 0.25 -> 0.5 (best 0.75)",
        f"  {folder / 'metrics.jsonl'}  metrics, one line a step",
    ]


def test_a_run_that_an_alarm_has_ended_names_it(folder):
    alarm = "step 2: entropy is 0 (run.stop_when: entropy < 1)"
    lines = closing_text(RunOutcome(3, stopped=True, alarm=alarm), folder).splitlines()
    assert lines[:2] == ["stopped after step 3, by an alarm; `dagrl run` with the same folder goes on", f"  {alarm}"]


def test_a_validation_alone_prints_its_scores(tmp_path):
    lines = [{"step": 2, "reward/mean": 0.5, "val/reward/mean": 0.25, "val/data/dropped_prompts": 0}, {"step": 4}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    outcome = RunOutcome(2, stopped=False, seconds=5, only_validated=True, policies=("actor",))
    lines = closing_text(outcome, tmp_path).splitlines()
    assert lines[:2] == ["validated the checkpoint of step 2 in 5 s", "  val/reward/mean  0.25"]
    assert lines[-2:] == ["next", f"  dagrl report {tmp_path}"]
    outcome = RunOutcome(0, stopped=False, only_validated=True)
    assert closing_text(outcome, tmp_path).startswith("validated the start weights\n")


@pytest.mark.parametrize(
    ("policies", "exports"),
    [
        (("actor",), ["dagrl export 'my runs/first' -o first-hf"]),
        (
            ("solver", "verifier"),
            [
                "dagrl export 'my runs/first' -o first-solver-hf --engine solver",
                "dagrl export 'my runs/first' -o first-verifier-hf --engine verifier",
            ],
        ),
    ],
)
def test_the_next_commands_can_be_pasted(policies, exports):
    told = closing_text(RunOutcome(3, stopped=False, policies=policies), Path("my runs/first")).splitlines()
    assert told == ["finished step 3", "next", *(f"  {each}" for each in ["dagrl report 'my runs/first'", *exports])]


def test_a_run_that_was_stopped_before_its_first_step_has_nothing_to_export():
    told = closing_text(RunOutcome(0, stopped=True, policies=("actor",)), Path("runs/first")).splitlines()
    assert told[-2:] == ["next", "  dagrl report runs/first"]
