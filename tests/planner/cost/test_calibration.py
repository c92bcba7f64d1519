"""Factors between a run's times and the cost model's, and where they hold."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from plan_parts import ONE_RANK, executor, task

from dagrl.config.loading.loader import load_pipeline
from dagrl.config.residency import Residency
from dagrl.config.schema import Scope
from dagrl.graph.inference import build_graph
from dagrl.planner.cost.calibration import CPU, Calibration, RunTimes, applied, calibrate, devices_of
from dagrl.planner.cost.lengths import Assumed
from dagrl.planner.simulation.costs import Work, seconds_of_step
from dagrl.scheduler.commands import Command, Commit, Run, Save, Sleep, Sync, Wake
from dagrl.scheduler.intervals import Activity
from dagrl.scheduler.placement import make_plan
from dagrl.scheduler.plan import HOST, Executor, Plan, WorkerId

TEMPLATE = Path(__file__).parents[3] / "dag_templates" / "tiny_grpo.yaml"
EXECUTORS = [
    Executor(HOST, None, ONE_RANK),
    executor("actor", "train", trained=True),
    executor("generator", "generate", weights_from="actor"),
]
TASKS = (
    task("rollout", "generator", streams=True, generates=True),
    task("reward", HOST, "rollout"),
    task("ref", "actor", "rollout"),
    task("update", "actor", "reward", "ref", scope=Scope.BATCH, trains=True),
)
PLAN = Plan({each.name: each for each in EXECUTORS}, TASKS, shards=2, steps=9)
ROLLOUT, REF, UPDATE = Work("rollout", "generator"), Work("ref", "actor"), Work("update", "actor")
SYNC, SLEEP = Work("sync", "generator"), Work("sleep", "actor")
ESTIMATED = {ROLLOUT: 2.0, REF: 1.0, UPDATE: 3.0, SYNC: 0.1, SLEEP: 0.0}
MEASURED = {ROLLOUT: 3.0, UPDATE: 1.5, SYNC: 0.4, SLEEP: 0.2}
FOUND = replace(calibrate(PLAN, ESTIMATED, MEASURED), driver_s=0.5)


@pytest.mark.parametrize(
    ("command", "factor"),
    [
        (Run(1, "rollout", (0, 1)), 1.5),
        (Run(1, "update", (0, 1)), 0.5),
        (Sync(1, "generator", "actor", 0), 4.0),
        # The run had no log-probs: by all that the engine did.
        (Run(1, "ref", (0,)), 0.5),
        # Neither measured nor estimated, or estimated as nothing.
        (Run(1, "reward", (0,)), 1.0),
        (Wake(1, "generator", Residency.AWAKE), 1.0),
        (Sleep(1, "actor", Residency.ASLEEP), 1.0),
        (Save(1, "actor"), 1.0),
        (Commit(1, save=False), 1.0),
    ],
)
def test_a_commands_factor_is_measured_over_estimated(command: Command, factor: float) -> None:
    assert FOUND.factor(command, PLAN) == pytest.approx(factor)


def test_no_run_changes_nothing() -> None:
    assert Calibration().factor(Run(1, "rollout", (0,)), PLAN) == 1.0


def test_seconds_of_a_step_are_medians_of_what_each_node_was_busy() -> None:
    def bar(name: str, on: str, step: int, start: float, end: float) -> Activity:
        return Activity(name, name, start, end, step, 0, "", WorkerId(on, 0))

    activities = [
        # A server's shards overlap; those of the host's workers each take a worker.
        *(bar("rollout", "generator", step, 0, end) for step in (2, 3, 4) for end in (2, 3)),
        *(bar("reward", HOST, step, 3, 5) for step in (2, 3, 4) for _ in range(2)),
        *(bar("update", "actor", step, 0, seconds) for step, seconds in ((2, 1), (3, 2), (4, 90))),
    ]
    assert seconds_of_step(PLAN, activities) == {ROLLOUT: 3.0, Work("reward", HOST): 4.0, UPDATE: 2.0}


def times(**other: object) -> RunTimes:
    loaded = load_pipeline(TEMPLATE)
    calibration = Calibration({UPDATE: 2.0, ROLLOUT: 3.0, Work("reward", HOST): 4.0}, {"actor": 2.0, HOST: 4.0}, 0.5)
    there = {"actor": CPU, "generator": CPU}
    return replace(
        RunTimes("runs/a", 9, 10, 1.0, {}, {}, calibration, Assumed(4.0, 2.5), there, "", loaded.pipeline), **other
    )


@pytest.mark.parametrize(
    ("overrides", "devices", "kept", "said"),
    [
        ([], {}, {"update", "rollout", "reward"}, ["did not have ref"]),
        ([], {"generator": "H200"}, {"update", "reward"}, ["generator is not calibrated: it ran on CPU slots"]),
        (["nodes.reward.args={extract: x}"], {}, {"update", "rollout"}, ["reward is not calibrated"]),
        (["model.init.hidden_size=128"], {}, {"update", "rollout", "reward"}, ["another model"]),
        (["nodes.ref=null", "engines.reference=null", "nodes.update.loss.kl_coef=0"], {}, {"update", "rollout"}, []),
    ],
)
def test_factors_hold_for_the_same_nodes_on_the_same_devices(
    overrides: list[str], devices: dict[str, str], kept: set[str], said: list[str]
) -> None:
    pipeline = load_pipeline(TEMPLATE, overrides).pipeline
    plan = make_plan(pipeline, build_graph(pipeline))
    found = applied(times(), pipeline, plan, devices_of(pipeline, plan, "H100") | devices)
    assert kept <= {work.name for work in found.calibration.work}
    assert all(any(text in note for note in found.notes) for text in said)
    assert bool(said) == bool(found.notes)
    assert found.calibration.driver_s == 0.5


def test_lengths_are_those_of_the_same_model_on_the_same_data() -> None:
    same, other = (load_pipeline(TEMPLATE, some).pipeline for some in ([], ["model.init.hidden_size=128"]))
    assert times().lengths_for(same, Assumed()) == Assumed(4.0, 2.5)
    assert times().lengths_for(same, Assumed(response_tokens=1.0)) == Assumed(4.0, 1.0)
    assert times().lengths_for(other, Assumed(prompt_tokens=7.0)) == Assumed(7.0)
