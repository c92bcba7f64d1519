"""Two agents, both trained, in one pipeline: `dag_templates/multi_agent.yaml`."""

from pathlib import Path

import pytest

from dagrl.config.loading.loader import load_pipeline
from dagrl.graph.inference import build_graph
from dagrl.scheduler.commands import Command, CommandDone, Run, ShardDone, Sync
from dagrl.scheduler.placement import make_plan
from dagrl.scheduler.plan import Plan
from dagrl.scheduler.scheduler import Scheduler

TEMPLATE = Path(__file__).parents[2] / "dag_templates" / "multi_agent.yaml"


@pytest.fixture(scope="module")
def plan() -> Plan:
    loaded = load_pipeline(TEMPLATE)
    return make_plan(loaded.pipeline, build_graph(loaded.pipeline, loaded.folder))


def test_each_agent_has_a_trainer_a_generator_and_metrics_of_its_own(plan: Plan):
    assert {name for name, executor in plan.executors.items() if executor.trained} == {"solver", "verifier"}
    follows = {name: executor.weights_from for name, executor in plan.executors.items() if executor.weights_from}
    assert follows == {"solving": "solver", "verifying": "verifier"}
    tasks = {task.name: task for task in plan.tasks}
    assert {name: task.sampled_by for name, task in tasks.items() if not name.startswith("val/")} == {
        "prompts": None,
        **dict.fromkeys(("solve", "reward", "ask", "advantage", "update", "samples"), "solve"),
        **dict.fromkeys(("verify", "judge", "judged", "update_verifier"), "verify"),
    }
    assert {name: task.metric_prefix for name, task in tasks.items() if task.metric_prefix} == {
        **dict.fromkeys(("verify", "val/verify"), "verify/"),
        "update_verifier": "update_verifier/",
    }
    assert plan.samples_per_prompt == 32


def test_the_solver_is_trained_while_the_verifier_answers(plan: Plan):
    scheduler = Scheduler(plan)
    waiting: list[Command] = scheduler.start()
    seen: list[str] = []
    while True:
        assert waiting, f"nothing runs any more; so far: {seen}"
        under_way = [command.task for command in waiting if isinstance(command, Run)]
        if "update" in under_way and "verify" in under_way:
            return
        # Whatever trains, or answers, takes its time.
        command = next((c for c in waiting if not (isinstance(c, Run) and c.task in ("update", "verify"))), waiting[0])
        waiting.remove(command)
        seen.append(str(command))
        if isinstance(command, Run):
            for shard in command.shards if plan.task(command.task).streams else ():
                waiting += scheduler.handle(ShardDone(command.step, command.task, shard))
            waiting += scheduler.handle(CommandDone(command))
        else:
            assert isinstance(command, Sync), command
            waiting += scheduler.handle(CommandDone(command))
