"""Which engines sleep, and what a pipeline file may not say about it."""

from __future__ import annotations

import pytest

from dagrl.config.loading.loader import load_pipeline
from dagrl.validation import check_file
from dagrl.validation.summary import summarize

GPUS = ("train: {cpus_per_node: 2}", "train: {gpus_per_node: 2}")
SHARED = ("group: rollout, weights_from: actor", "group: train, weights_from: actor")
NO_ROLLOUT = ("  rollout: {cpus_per_node: 1}\n", "")


def asleep(path, *overrides: str) -> list[str]:
    pipeline = load_pipeline(path, overrides).pipeline
    return [name for name in pipeline.engines if pipeline.sleeps(name)]


def test_engines_that_share_gpus_sleep_by_default(project):
    assert asleep(project.pipeline(GPUS, SHARED)) == ["actor", "generator"]
    assert asleep(project.pipeline(GPUS)) == []
    assert asleep(project.pipeline(SHARED)) == []


def test_an_engine_that_stays_while_others_come_and_go_is_known(project):
    path = project.pipeline(GPUS, SHARED)

    def staying(*overrides: str) -> list[str]:
        pipeline = load_pipeline(path, overrides).pipeline
        return [name for name in pipeline.engines if pipeline.stays_beside_sleepers(name)]

    assert staying() == []
    assert staying("engines.actor.sleep=false") == ["actor"]
    assert staying("engines.actor.sleep=false", "engines.generator.sleep=false") == []


def test_sleep_can_be_set_for_each_engine(project):
    assert asleep(project.pipeline(GPUS, SHARED), "engines.actor.sleep=false") == ["generator"]
    assert asleep(project.pipeline(SHARED), "engines.actor.sleep=true", "engines.generator.sleep=true") == [
        "actor",
        "generator",
    ]


def test_an_engine_alone_on_its_group_does_not_sleep(project):
    path = project.pipeline(("group: rollout,", "group: rollout, sleep: true,"))
    assert asleep(path) == []


def test_an_engine_on_anothers_ranks_goes_with_that_one(project):
    path = project.pipeline(
        ("frozen_copy_of: actor}", "frozen_copy_of: actor, sleep: false} #!"), GPUS, SHARED, NO_ROLLOUT
    )
    assert asleep(path) == ["actor", "generator"]
    project.assert_problem(
        path,
        "engines.reference.sleep",
        "copy-differs",
    )


def test_memory_that_nccl_knows_cannot_be_left(project):
    buffers = ("    group: train\n", "    group: train\n    ddp: {nccl_ub: true} #!\n")
    path = project.pipeline(buffers, GPUS, SHARED, NO_ROLLOUT)
    fragment = "cannot be left while `generator` works there; remove it, or say `sleep: false`"
    project.assert_problem(path, "engines.actor.ddp.nccl_ub", fragment)
    check_file(path, ["engines.actor.sleep=false"])
    offload = "engines.actor.offload.grad=true"
    assert "remove `offload`" in project.only_problem(path, "engines.actor.sleep=false", offload).message


@pytest.mark.parametrize("value", ["sometimes", "1"])
def test_sleep_is_a_choice_or_left_to_dagrl(project, value):
    path = project.pipeline(("group: rollout,", f"group: rollout, sleep: {value},"))
    message = project.only_problem(path).message
    assert "auto" in message and "true or false" in message


def test_the_summary_says_who_sleeps(project):
    text = summarize(check_file(project.pipeline(GPUS, SHARED, NO_ROLLOUT)))
    assert "on train: tp 1, dp 2, sleeps while other engines run there\n" in text
    assert "on train: 2 replicas, weights from actor, sleeps while other engines run there\n" in text
    assert "sleeps" not in summarize(check_file(project.pipeline()))
