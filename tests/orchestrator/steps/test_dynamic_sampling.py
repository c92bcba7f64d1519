"""From a filter's blocks to the batch: the driver's work at the end of a round."""

from __future__ import annotations

import numpy as np
import pytest
from plan_parts import ONE_RANK, task

from dagrl.config.schema import Pipeline, Scope
from dagrl.ops.work import SourceWork
from dagrl.orchestrator.steps.batch_index import BatchIndex
from dagrl.orchestrator.steps.dispatch import OpInputs, dispatch
from dagrl.orchestrator.steps.dynamic_sampling import DynamicSampling
from dagrl.orchestrator.steps.record import StepRecord
from dagrl.scheduler.commands import BatchShort, CommandDone, Run
from dagrl.scheduler.plan import HOST, Executor, Plan, PlannedTask, Rows
from dagrl.workers.errors import RunError
from dagrl.workers.messages import Block

N, SHARDS, STEP = 2, 2, 4
HOST_EXECUTOR = Executor(HOST, None, ONE_RANK)


class Step:
    """A step of four prompts behind a filter, whose blocks are recorded by hand."""

    def __init__(self, lab, **node) -> None:
        declared = lab.tiny_pipeline()
        declared["data"]["prompts_per_step"] = 4
        declared["nodes"]["update"]["mini_batch"] = 2
        declared["nodes"]["keep"] = {"op": "filter", **node}
        self.pipeline = Pipeline.model_validate(declared)
        tasks = (
            task("prompts", HOST, scope=Scope.BATCH, in_rounds=True),
            task("keep", HOST, "prompts", scope=Scope.BATCH, in_rounds=True, selects=True),
        )
        plan = Plan({HOST: HOST_EXECUTOR}, tasks, shards=SHARDS, steps=9, samples_per_prompt=N)
        self.source, self.chooser = tasks
        self.rounds, self.batch_index, self.record = (
            DynamicSampling(self.pipeline, plan),
            BatchIndex(N, SHARDS),
            StepRecord(STEP),
        )

    def sampled(self, at: int) -> list[int]:
        """The groups of a round, added to the batch_index as the source adds them."""
        run = Run(STEP, "prompts", (0, 1), at)
        (work,) = dispatch(
            *(run, self.source, HOST_EXECUTOR, self.batch_index, self.pipeline),
            committed=3,
            inputs=OpInputs(prompts=range(self.rounds.prompts(run))),
        )
        assert isinstance(work, SourceWork)
        groups = list(range(work.first_group, work.first_group + len(work.prompts)))
        for shard in range(SHARDS):
            rows = np.concatenate([np.arange(group * N, (group + 1) * N) for group in groups[shard::SHARDS]])
            self.batch_index.add_source("prompts", Block(rows, f"{at} {shard}", None, 0, 1, (shard,)))
        return groups

    def end(self, at: int, passed: list[int]):
        run = Run(STEP, "keep", (0, 1), at)
        self.rounds.add(run, self.batch_index, Block(self.batch_index.rows_of(passed), None, None, 0, 1))
        return self.rounds.end_round(run, self.batch_index, self.record)

    def batch(self, *shards: int) -> list[int]:
        return self.batch_index.groups_in(self.batch_index.rows(shards))


def test_rounds_count_their_groups_on_until_the_batch_is_full(lab):
    step = Step(lab)
    assert step.sampled(0) == [0, 1, 2, 3]
    assert step.end(0, [1, 3]) == BatchShort(Run(STEP, "keep", (0, 1), 0))
    # Half have passed: two groups take four prompts, and no round is larger than the first.
    assert step.sampled(1) == [4, 5, 6, 7]
    assert step.batch(0, 1) == [4, 5, 6, 7]
    assert step.end(1, [5]) == BatchShort(Run(STEP, "keep", (0, 1), 1))
    third = step.sampled(2)
    assert third[0] == 8
    assert step.end(2, third) == CommandDone(Run(STEP, "keep", (0, 1), 2))
    assert [step.batch(shard) for shard in range(SHARDS)] == [[1, 3], [5, 8]]
    metrics = step.record.metrics(tokens=1, policy_version=STEP, slots=1)
    assert metrics["filter/rounds"] == 3
    assert "filter/filled_prompts" not in metrics
    assert metrics["filter/kept_fraction"] == pytest.approx((3 + len(third)) / (8 + len(third)))


def test_nodes_after_the_filter_take_mini_batches_of_the_passed_groups(lab):
    step = Step(lab, prompts_per_round=8)
    step.sampled(0)
    assert isinstance(step.end(0, [0, 2, 3, 6, 7]), CommandDone)
    inputs = {"advantage": ("prompts", "answer")}
    update = PlannedTask("update", "update", "update", HOST, Scope.BATCH, Rows.TRAIN, inputs=inputs, trains=True)
    (work,) = dispatch(Run(STEP, "update", (0, 1)), update, HOST_EXECUTOR, step.batch_index, step.pipeline, committed=3)
    assert [part.rows.tolist() for part in work.parts] == [[0, 1, 4, 5], [6, 7, 12, 13]]


def test_a_step_that_cannot_be_full_ends_the_run_and_its_batch_does_not_change(lab):
    step = Step(lab, max_rounds=1)
    step.sampled(0)
    with pytest.raises(RunError, match="2 of 4 prompts have passed in 1 round, and the step needs 4"):
        step.end(0, [0, 1])


def test_steps_that_overlap_have_rounds_of_their_own(lab):
    step = Step(lab)
    step.sampled(0)
    step.end(0, [1])
    assert step.rounds.prompts(Run(STEP + 1, "prompts", (0, 1))) == 4
    assert step.rounds.prompts(Run(STEP, "prompts", (0, 1), 1)) == 4
    step.rounds.commit(STEP)
    step.rounds.commit(STEP + 1)
